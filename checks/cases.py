"""Inputs that pipelines get wrong elsewhere, one line each: what is right, and what was found here.

    python -m checks.cases [WORD ...]

Each case is a kind of fault, and names the tests that are to make it impossible. These are run, by pytest as in
``make test``; a case is right when all of them pass and none is missing. Most hold training through several layouts
against plain PyTorch in one process, in float64: in how many runs, and by how much the worst of them differed, stands
in the line. With words, only the cases whose name holds one of them. Ends with code 1 when a case is not right.
Two minutes on two cores.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import pytest

from tests.pipeline.reference import COMPARED

FOLDER = Path(__file__).parents[1] / "tests" / "pipeline"


@dataclass(frozen=True)
class Case:
    """A kind of fault: its name, what is right instead, and the tests of one file that assert it."""

    name: str
    right: str
    file: str
    tests: tuple[str, ...]


def of(file: str, *cases: tuple[str, str, Sequence[str]]) -> tuple[Case, ...]:
    return tuple(Case(name, right, file, tuple(f"test_{test}" for test in tests)) for name, right, tests in cases)


CASES: tuple[Case, ...] = (
    *of(
        "test_boundaries.py",
        (
            "indices made on one stage, looked up on another",
            "equals plain; no gradient slot; layers see no made-up data",
            (
                "indices_made_on_one_stage_are_looked_up_on_another",
                "integers_have_no_gradient_slot",
                "layers_never_see_made_up_data",
            ),
        ),
        (
            "dict, nested tuple, None, 0-d, complex, bool mask",
            "arrives as it was; floating and complex leaves get gradients",
            (
                "a_structure_arrives_as_it_was",
                "an_object_that_would_hide_a_gradient_is_refused",
                "structures_arrive_between_processes",
                "the_same_tensor_twice_stays_one",
            ),
        ),
        (
            "a tensor that three stages only hand on",
            "its gradient flows back through all of them",
            ("a_tensor_that_only_passes_through_takes_its_gradient_all_the_way_back",),
        ),
        (
            "an activation without gradient in some micro-batches",
            "zeros for those, equals plain, nobody waits",
            (
                "a_gradient_that_some_micro_batches_do_not_have_is_zero",
                "a_gradient_may_be_needed_first_in_a_later_step",
            ),
        ),
        (
            "a view at a boundary, an operation in place behind it",
            "equals plain, backward split or not; user's data untouched",
            (
                "views_and_changes_in_place",
                "views_while_layers_are_timed",
                "the_users_data_is_never_changed",
                "memory_that_a_layer_uses_again",
                "a_layer_that_remembers_is_recomputed_as_it_ran",
                "the_memory_order_of_a_view_does_not_change_a_bit",
            ),
        ),
        (
            "hooks on boundary tensors and modules",
            "fire once a micro-batch, never pile up",
            ("hooks_fire_once_a_micro_batch",),
        ),
        (
            "shapes that depend on values",
            "equals plain, declared or not, down to no rows",
            ("shapes_that_depend_on_values",),
        ),
    ),
    *of(
        "test_batches.py",
        (
            "10 samples in micro-batches of 3, 3, 3, 1",
            "the mean over 10 samples",
            (
                "ten_samples_in_uneven_micro_batches_have_the_mean_of_ten",
                "a_weight_of_ones_own",
                "a_micro_batch_without_weight_has_no_part_in_the_step",
                "evaluation_is_the_same_mean",
            ),
        ),
        (
            "another length in every micro-batch, 4 ranks",
            "equals plain, no deadlock, a shape is told once",
            (
                "every_micro_batch_has_a_length_of_its_own",
                "every_micro_batch_has_a_length_of_its_own_between_processes",
                "a_length_is_told_once",
                "a_batch_that_becomes_smaller_and_larger_again",
            ),
        ),
        (
            "more micro-batches than before, fewer than ranks, one",
            "equals plain",
            ("the_number_of_micro_batches_changes_from_step_to_step",),
        ),
        (
            "a whole batch with a 0-d tensor and a vector beside it",
            "cut where the size is the batch's; else declared",
            (
                "only_what_has_the_size_of_the_batch_is_split",
                "what_could_be_meant_both_ways_must_be_declared",
                "a_batch_that_cannot_be_cut",
                "a_batch_that_was_split_trains_as_the_whole",
            ),
        ),
        (
            "targets that are a tuple, or absent",
            "equals plain",
            ("targets_of_any_form", "a_loss_without_targets_weighs_rows_of_the_inputs"),
        ),
    ),
    *of(
        "test_parameters.py",
        (
            "frozen: first layer, first stage, middle, all but biases",
            "equals plain on every schedule, no gradient lost",
            ("frozen_parameters", "nothing_is_sent_back_to_frozen_stages"),
        ),
        (
            "everything frozen",
            "a clear error before the first step",
            ("nothing_to_train",),
        ),
        (
            "a Parameter used twice in a stage, on a rank, in 3 places",
            "its gradient is the sum of the uses, once",
            (
                "a_parameter_used_twice_in_a_layer",
                "a_tied_parameter_gets_the_sum_of_its_uses_once",
                "a_tied_parameter_may_be_frozen",
                "a_tied_parameter_between_processes",
                "ready_modules_that_share",
            ),
        ),
        (
            "stages without parameters, ranks with an empty stage",
            "equals plain",
            ("stages_without_parameters", "ranks_with_an_empty_stage"),
        ),
        (
            "one seed at 1, 2, 3 and 4 ranks and other cuts",
            "the same first weights; nobody builds the whole model",
            ("first_values_depend_on_the_seed_alone", "nobody_builds_the_whole_model"),
        ),
    ),
    *of(
        "test_steps.py",
        (
            "eval_batch before train_batch; without targets",
            "no_grad, through a forward-only schedule, equals plain",
            (
                "evaluation_before_and_after_training",
                "evaluation_without_targets",
                "the_mode_of_the_caller_does_not_matter",
            ),
        ),
        (
            "micro-batch 1 finishes before micro-batch 0",
            "losses and outputs are told by number",
            ("results_are_told_by_micro_batch_and_not_by_when_they_are_ready",),
        ),
        (
            "dropout, recomputed or not, at 1 to 4 ranks, other cuts",
            "the same masks, the same bits",
            (
                "dropout_has_the_same_masks_on_every_layout",
                "copies_of_a_pipeline_draw_numbers_of_their_own",
                "layers_that_come_to_draw_later",
            ),
        ),
        (
            "gradient norm of 8 samples in 1, 2, 4, 8 micro-batches",
            "one number on every rank and layout; clips by it",
            ("the_gradient_norm_does_not_depend_on_how_samples_are_cut", "the_gradient_norm_over_copies_of_a_pipeline"),
        ),
        (
            "an auxiliary loss in a middle stage",
            "its gradient enters there; its weighted mean is told",
            (
                "a_loss_added_in_the_middle",
                "losses_added_at_either_end_and_by_the_loss_itself",
                "parameters_that_only_an_added_loss_trains",
            ),
        ),
    ),
    *of(
        "test_failures.py",
        (
            "a layer raises at micro-batch 3, caught, train again",
            "the same bits as if the failed step had not been",
            (
                "nothing_is_left_of_a_step_that_failed",
                "nothing_is_left_of_a_step_that_failed_between_processes",
                "nothing_is_left_of_an_update_that_failed",
                "an_update_that_failed_on_one_rank_is_told_on_all",
                "an_evaluation_that_failed",
            ),
        ),
        (
            "one rank raises ValueError, the others wait",
            "read first, with rank, layer, action; all end in 10 s",
            (
                "the_layer_that_failed_is_named_and_its_error_is_shown_first",
                "all_processes_end_soon_after_one",
                "torchrun_shows_the_error_of_the_rank_that_failed_first",
            ),
        ),
    ),
)


@dataclass
class Found:
    """What became of the tests of a case: how many passed, what went wrong, and every comparison with plain PyTorch."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    compared: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        if self.failed:
            return f"{len(self.failed)} of {self.passed + len(self.failed)} tests fail"
        worst = f", {len(self.compared)} runs within {max(self.compared):.0e} of plain" if self.compared else ""
        return f"{self.passed} tests pass{worst}"


class Ledger:
    """A plugin of pytest that prints a case when the last of its tests is over."""

    def __init__(self, cases: Sequence[Case], out: TextIO) -> None:
        self.found = {case: Found() for case in cases}
        self._case_of = {(case.file, test): case for case in cases for test in case.tests}
        self._left: Counter[Case] = Counter()
        self._out = out

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        seen = {_key(item.nodeid) for item in session.items}
        self._left.update(self._case_of[_key(item.nodeid)] for item in session.items)
        for key, case in self._case_of.items():
            if key not in seen:
                self.found[case].failed.append(f"there is no {'::'.join(key)}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        COMPARED.clear()
        result = yield
        self.found[self._case_of[_key(item.nodeid)]].compared += COMPARED
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = self._case_of[_key(report.nodeid)]
        found = self.found[case]
        if report.failed or report.skipped:
            found.failed.append(f"{report.nodeid}\n{report.longreprtext}")
        elif report.when == "call":
            found.passed += 1
        if report.when == "teardown":
            self._left[case] -= 1
            if not self._left[case]:
                verdict = "NO" if found.failed else "ok"
                print(f"{verdict:3}{case.name:58}{case.right:62}{found}", file=self._out, flush=True)


def _key(node: str) -> tuple[str, str]:
    """The file and the function of a test, without its parameters."""
    path, _, test = node.partition("::")
    return Path(path).name, test.partition("[")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="run only the cases whose name holds one of these")
    words = parser.parse_args().words
    cases = [case for case in CASES if not words or any(word in case.name for word in words)]
    if not cases:
        parser.error(f"no case has one of these in its name: {' '.join(words)}")
    ledger = Ledger(cases, sys.stdout)
    print(f"{'':3}{'case':58}{'right':62}found", flush=True)
    tests = [f"{FOLDER / case.file}::{test}" for case in cases for test in case.tests]
    with redirect_stdout(io.StringIO()) as told:
        code = pytest.main(["-q", "--rootdir", str(FOLDER.parents[1]), "-p", "no:cacheprovider", *tests], [ledger])
    failed = [case for case, found in ledger.found.items() if found.failed or not found.passed]
    for case in failed:
        print(f"\nNO: {case.name}", *ledger.found[case].failed, sep="\n")
    if code > pytest.ExitCode.TESTS_FAILED or (code and not failed):
        print(told.getvalue())
    print(f"\n{len(cases) - len(failed)} of {len(cases)} cases are right")
    return 1 if failed or code else 0


if __name__ == "__main__":
    sys.exit(main())
