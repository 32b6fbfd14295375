"""The deaths that test_launcher_with_threads.py leaves out, for they take long: a launcher that has a thread again."""

from __future__ import annotations

import pytest

from tests.process.test_a23_nested import (  # noqa: F401 - run again here
    test_processes_that_an_operator_starts_can_be_terminated,
)
from tests.process.test_deaths import (  # noqa: F401 - run again here
    test_a_record_that_kills_its_worker_is_named,
    test_a_setup_that_raises,
    test_a_worker_killed_inside_a_function,
    test_deaths_in_a_second_stage,
    test_workers_that_always_die_in_setup,
    test_workers_that_die_in_the_middle_of_a_task,
)
from tests.process.test_launcher_with_threads import launcher_with_a_thread

pytestmark = [pytest.mark.law("L7"), pytest.mark.slow]
__all__ = ["launcher_with_a_thread"]  # a fixture
