"""Each line of the README's "What happens when..." is backed by tests that exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"
BACKED_BY = {
    "the process is killed": [
        "test_kill.py::test_a_job_that_is_killed_twenty_times_gives_the_same",
        "test_faults.py::test_a_fault_at_any_operation_of_the_disk_loses_nothing",
    ],
    "Ctrl-C, SIGTERM or SIGHUP": ["test_cli.py::test_a_run_that_is_told_to_end_keeps_what_is_finished"],
    "a second signal": [
        "test_interrupts.py::test_a_second_signal_later_ends_the_process_at_once",
        "test_interrupts.py::test_signals_that_come_together_are_one_request",
    ],
    "the same command runs again": ["test_resume.py::test_the_same_command_on_a_finished_run_does_nothing"],
    "the command, the model or the tokenizer has changed": [
        "test_resume.py::test_what_determines_results_must_be_the_same",
        "test_resume.py::test_another_model_is_refused",
        "test_fingerprint.py::test_a_model_is_told_by_each_kind_of_its_files",
    ],
    "the output file was changed": [
        "test_resume.py::test_an_output_that_is_not_as_it_was_left_is_made_again",
        "test_robustness.py::test_an_output_that_someone_else_changed_is_not_merged",
    ],
    "other settings have changed": ["test_resume.py::test_what_does_not_determine_results_may_change"],
    "the input has grown": [
        "test_resume.py::test_an_input_that_grew_goes_on_with_the_new_rows",
        "test_fingerprint.py::test_a_folder_may_get_files_at_its_end",
    ],
    "the input has changed otherwise": [
        "test_resume.py::test_an_input_that_changed_is_refused",
        "test_fingerprint.py::test_a_stream_is_told_by_its_first_rows",
    ],
    "two processes write to one output": ["test_robustness.py::test_a_second_process_is_refused"],
    "the disk is full": ["test_faults.py::test_a_fault_at_any_operation_of_the_disk_loses_nothing"],
    "the output folder is removed": [
        "test_faults.py::test_a_folder_that_is_removed_under_way_ends_the_run_in_a_sentence",
        "test_robustness.py::test_a_disk_that_becomes_read_only_ends_the_run_in_a_sentence",
    ],
    "a finished part is damaged": [
        "test_faults.py::test_a_damaged_part_is_set_aside_and_its_rows_run_again",
        "test_finished.py::test_a_damaged_part_is_renamed",
    ],
    "a step runs out of memory": ["test_out_of_memory.py::*"],
    "the model computes NaN": ["test_engine.py::*nan*"],
    "a line is broken": ["test_robustness.py::test_a_strange_line_gets_its_outcome_and_its_neighbours_theirs"],
    "a file has a BOM, CRLF, U+2028 inside a string": [
        "test_robustness.py::test_marks_line_ends_and_blank_lines_are_no_rows",
        "test_robustness.py::test_a_strange_line_gets_its_outcome_and_its_neighbours_theirs",
    ],
    "a prompt is enormous": ["test_robustness.py::test_an_enormous_prompt_is_too_long_without_being_tokenized"],
    "ids are not unique": ["test_robustness.py::test_ids_that_are_not_unique_lose_nobody"],
    "a template never ends": ["test_templates.py::*"],
    "a row's text spells special tokens": ["test_special_tokens.py::*"],
    "a model folder brings code": ["test_remote_code.py::*"],
    "something is plainly wrong": [
        "test_resume.py::test_a_run_with_too_many_errors_ends_early_and_goes_on_with_a_higher_limit"
    ],
}


def lines_of_the_section() -> list[str]:
    section = README.read_text("utf-8").split("## What happens when...")[1].split("\n## ")[0]
    return re.findall(r"^\| \*\*(.+?)\*\*", section, re.MULTILINE)


def names_of(file: str) -> list[str]:
    tree = ast.parse((TESTS / file).read_text("utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def test_each_line_has_its_tests() -> None:
    assert lines_of_the_section() == list(BACKED_BY)
    for names in BACKED_BY.values():
        for name in names:
            file, _, pattern = name.partition("::")
            expression = re.compile(pattern.replace("*", ".*"))
            assert any(expression.fullmatch(test) for test in names_of(file)), name
