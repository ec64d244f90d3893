"""An expression reads what einsum reads, and says which operand does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from dask_eindecomp.expression import AGGREGATES, JOINS, Aggregate, Expression, ExpressionError
from tests import oracle, strategies


def test_a_matmul_contracts_the_label_its_output_lacks() -> None:
    matmul = Expression.parse("ij,jk->ik")
    assert matmul.operands == (("i", "j"), ("j", "k"))
    assert matmul.output == ("i", "k")
    assert matmul.labels == ("i", "j", "k")
    assert matmul.contracted == ("j",)
    assert (matmul.join, matmul.aggregate) == ("multiply", "sum")


def test_without_an_arrow_the_output_is_every_label_that_appears_once_sorted() -> None:
    assert Expression.parse("kj,ji").output == ("i", "k")
    assert Expression.parse("ii").output == ()


def test_spaces_do_not_matter() -> None:
    assert Expression.parse(" ij , jk -> ik ") == Expression.parse("ij,jk->ik")


def test_an_operand_may_be_a_scalar() -> None:
    scaled = Expression.parse(",i->i")
    assert scaled.operands == ((), ("i",))
    assert scaled.extents(((), (5,))) == {"i": 5}


def test_upper_and_lower_case_are_different_labels() -> None:
    assert Expression.parse("iI->i").contracted == ("I",)


def test_a_label_twice_in_one_operand_is_a_diagonal_of_one_extent() -> None:
    diagonal = Expression.parse("ii->i")
    assert diagonal.labels == ("i",)
    assert diagonal.extents(((3, 3),)) == {"i": 3}


def test_an_output_label_that_no_operand_has_is_an_axis_to_broadcast_to() -> None:
    assert Expression((("i",),), ("i", "b")).labels == ("i", "b")


def test_it_prints_its_einsum_and_only_the_names_that_say_something() -> None:
    assert str(Expression.parse("ij,jk->ik")) == "ij,jk->ik"
    assert str(Expression.parse("ik,jk->ij", join="subtract", aggregate="max")) == "subtract max ik,jk->ij"
    assert str(Expression.parse("i,i->i", join="add", aggregate="max")) == "add i,i->i"


def test_an_aggregate_of_ones_own_is_known_by_its_name() -> None:
    span = Aggregate(None, np.maximum, name="span")
    assert Expression.parse("ij->i", aggregate=span).aggregate_name == "span"
    assert str(Expression.parse("ij->i", aggregate=span)) == "span ij->i"


@pytest.mark.parametrize("name", [name for name, one in AGGREGATES.items() if one.identity is not None])
def test_the_identity_of_an_aggregate_changes_nothing(name: str) -> None:
    values = np.array([True, False]) if name in ("any", "all") else np.array([-2.5, 0.0, 3.0])
    combined = AGGREGATES[name].combine(values, AGGREGATES[name].identity)
    assert np.array_equal(combined, values)


@pytest.mark.parametrize("name", AGGREGATES)
def test_an_aggregate_combines_as_numpy_does(name: str) -> None:
    pair = np.array([0.5, -1.0]), np.array([2.0, 0.25])
    aggregate = AGGREGATES[name]
    assert aggregate.name == name
    assert aggregate.finalize is None
    assert np.allclose(aggregate.combine(*pair), oracle.AGGREGATES[name](*pair))


@pytest.mark.parametrize("name", JOINS)
def test_a_join_is_the_function_it_is_named_after(name: str) -> None:
    pair = np.array([0.5, 1.0]), np.array([2.0, -0.25])
    assert np.array_equal(JOINS[name](*pair), oracle.JOINS[name](*pair))


def test_a_character_that_is_no_letter_is_named() -> None:
    with pytest.raises(ExpressionError, match=r"character '1' in 'i1->i' is no label; expected letters"):
        Expression.parse("i1->i")


def test_an_ellipsis_is_refused_rather_than_guessed() -> None:
    with pytest.raises(ExpressionError, match=r"character '\.' in"):
        Expression.parse("...i->i")


def test_a_second_arrow_is_refused() -> None:
    with pytest.raises(ExpressionError, match=r"character '-' in 'ij->i->'"):
        Expression.parse("ij->i->")


def test_an_output_label_of_no_operand_is_named_with_those_there_are() -> None:
    with pytest.raises(ExpressionError, match=r"output label 'z' of 'ij->iz' is in no operand.*one of i, j"):
        Expression.parse("ij->iz")


def test_where_no_operand_has_a_label_the_message_says_none() -> None:
    with pytest.raises(ExpressionError, match=r"output label 'z' of '->z' is in no operand; .* none"):
        Expression.parse("->z")


def test_an_output_label_may_not_repeat() -> None:
    with pytest.raises(ExpressionError, match=r"output label 'i' appears 2 times in 'ij->ii'; expected once"):
        Expression.parse("ij->ii")


def test_an_unknown_aggregate_is_named_with_those_there_are() -> None:
    with pytest.raises(
        ExpressionError, match=r"unknown aggregate 'median' in 'ij->i'; expected one of sum, prod"
    ):
        Expression.parse("ij->i", aggregate="median")


def test_the_number_of_operands_must_be_that_of_the_subscripts() -> None:
    with pytest.raises(ExpressionError, match=r"'ij,jk->ik' takes 2 operands but was given 1"):
        Expression.parse("ij,jk->ik").extents(((2, 3),))


def test_an_operand_of_another_rank_is_named() -> None:
    with pytest.raises(ExpressionError, match=r"operand 1 of 'ij,jk->ik' has 1 axes but 2 labels"):
        Expression.parse("ij,jk->ik").extents(((2, 3), (3,)))


def test_a_label_of_two_lengths_is_named_with_both() -> None:
    with pytest.raises(
        ExpressionError, match=r"label 'j' is 64 long in operand 0 but 48 in operand 1 of 'ij,jk->ik'"
    ):
        Expression.parse("ij,jk->ik").extents(((2, 64), (48, 2)))


def test_a_diagonal_of_an_oblong_is_refused() -> None:
    with pytest.raises(ExpressionError, match=r"label 'i' is 2 long in operand 0 but 3 in operand 0"):
        Expression.parse("ii->i").extents(((2, 3),))


def test_its_errors_are_value_errors() -> None:
    assert issubclass(ExpressionError, ValueError)


@given(strategies.expressions())
def test_what_is_printed_is_read_back(drawn: tuple[Expression, dict[str, int]]) -> None:
    expression, _ = drawn
    assert Expression.parse(expression.einsum, expression.join, expression.aggregate) == expression


@given(strategies.expressions())
def test_labels_are_output_and_contracted_each_once(drawn: tuple[Expression, dict[str, int]]) -> None:
    expression, _ = drawn
    assert sorted(expression.labels) == sorted((*expression.output, *expression.contracted))


@given(strategies.expressions())
def test_extents_come_back_from_the_shapes(drawn: tuple[Expression, dict[str, int]]) -> None:
    expression, extents = drawn
    shapes = tuple(tuple(extents[label] for label in labels) for labels in expression.operands)
    assert expression.extents(shapes) == extents
