"""Settings: defaults, what overrides them, and in which order."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import dask
import pytest

from dask_eindecomp import EinDecomp
from dask_eindecomp.config import DEFAULTS, setting

ROOT = Path(__file__).parents[1]


def in_a_new_process(code: str, **environment: str) -> str:
    """What a Python with nothing but the defaults and some variables prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    path = os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_failed_plan_does_not_fail_the_computation_unless_asked_to() -> None:
    assert DEFAULTS["eindecomp"]["strict"] is False


def test_a_plan_must_be_five_percent_cheaper() -> None:
    assert DEFAULTS["eindecomp"]["margin"] == 0.05


def test_importing_the_package_sets_its_defaults() -> None:
    code = "import dask_eindecomp, dask; print(sorted(dask.config.get('eindecomp').items()))"
    assert in_a_new_process(code) == str(sorted(DEFAULTS["eindecomp"].items()))


def test_importing_the_package_keeps_what_is_set() -> None:
    code = (
        "import dask; dask.config.set({'eindecomp.margin': 0.5}); "
        "import dask_eindecomp; print(sorted(dask.config.get('eindecomp').items()))"
    )
    assert in_a_new_process(code) == str(sorted((DEFAULTS["eindecomp"] | {"margin": 0.5}).items()))


def test_an_environment_variable_sets_one() -> None:
    code = "from dask_eindecomp.config import setting; print(setting('margin'), setting('strict'))"
    assert in_a_new_process(code, DASK_EINDECOMP__MARGIN="0.25") == "0.25 False"
    assert in_a_new_process(code, DASK_EINDECOMP__STRICT="True") == "0.05 True"


def test_the_configuration_is_read_when_it_is_asked_for() -> None:
    with dask.config.set({"eindecomp.margin": 0.5}):
        assert setting("margin") == 0.5
    assert setting("margin") == 0.05


@pytest.mark.parametrize("given", [0.0, 0.2])
def test_what_is_given_comes_before_the_configuration(given: float) -> None:
    with dask.config.set({"eindecomp.margin": 0.5}):
        assert setting("margin", given) == given


def test_given_false_is_not_mistaken_for_not_given() -> None:
    with dask.config.set({"eindecomp.strict": True}):
        assert setting("strict", False) is False


def test_a_hook_takes_the_configuration_along() -> None:
    with dask.config.set({"eindecomp.margin": 0.5, "eindecomp.strict": False}):
        sent = pickle.dumps(EinDecomp())
    with dask.config.set({"eindecomp.margin": 0.1, "eindecomp.strict": True}):
        arrived = pickle.loads(sent)
    assert (arrived.margin, arrived.strict) == (0.5, False)
