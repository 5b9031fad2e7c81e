"""The benchmarks' workloads, and that their results are computed as they say."""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.common import rates_of, ratios_of
from benchmarks.peers.ctranslate2_batch import common_beginning
from benchmarks.peers.work import Row, check_lengths, read_rows
from benchmarks.prompts import Chat
from benchmarks.workloads import WARM_UP_TOKENS, WORKLOADS, Source, Workload, write_rounds

BENCHMARKS = Path(peers.__file__).resolve().parent.parent


def encode(chats: Sequence[Chat]) -> list[list[int]]:
    return [[ord(character) for character in chat[-1]["content"]] for chat in chats]


SOURCE = Source(1000, encode)


@pytest.mark.parametrize("name", WORKLOADS)
def test_rows_belong_to_their_round(name: str) -> None:
    workload = WORKLOADS[name]
    rows = workload.rows_of_round(SOURCE, 1)
    assert rows == workload.rows_of_round(SOURCE, 1)
    assert len(rows) == workload.rows
    other = workload.rows_of_round(SOURCE, 2)
    assert [row.prompt_token_ids for row in rows] != [row.prompt_token_ids for row in other]
    assert [row.max_tokens for row in rows] == [row.max_tokens for row in other]
    assert all(row.prompt_token_ids for row in rows)
    assert {(row.n, row.temperature, row.top_p) for row in rows} == {
        (workload.n, workload.temperature, workload.top_p),
    }


def test_fixed_lengths() -> None:
    rows = WORKLOADS["fixed"].rows_of_round(SOURCE, 0)
    assert {(len(row.prompt_token_ids), row.max_tokens) for row in rows} == {(128, 128)}
    assert max(max(row.prompt_token_ids) for row in rows) < SOURCE.vocab_size


def test_mix_has_the_means_and_the_tail_of_the_trace() -> None:
    rows = WORKLOADS["mix"].rows_of_round(SOURCE, 0)
    prompts = [len(row.prompt_token_ids) for row in rows]
    outputs = [row.max_tokens for row in rows]
    assert sum(prompts) / len(rows) == pytest.approx(161, rel=0.02)
    assert sum(outputs) / len(rows) == pytest.approx(338, rel=0.02)
    assert max(outputs) > 2 * 338 > 8 * min(outputs)
    assert max(map(sum, zip(prompts, outputs, strict=True))) <= 2048


def test_rounds_are_written_and_warmed_up_with_few_tokens(tmp_path: Path) -> None:
    workload = Workload(5, prompt=7, output=WARM_UP_TOKENS + 1)
    measured = write_rounds(workload, SOURCE, tmp_path, rounds=2)
    assert [read_rows(tmp_path, number) for number in range(2)] == measured
    assert read_rows(tmp_path, 0, most=3) == measured[0][:3]
    warm_up = read_rows(tmp_path, 2)
    assert [row.max_tokens for row in warm_up] == [WARM_UP_TOKENS] * 5
    assert warm_up[0].prompt_token_ids not in [row.prompt_token_ids for rows in measured for row in rows]


def test_completions_of_other_lengths_are_refused() -> None:
    rows = [Row([1, 2], 3), Row([1], 4, n=2)]
    check_lengths(rows, [[3], [4, 4]])
    for wrong in ([[3], [4, 3]], [[3], [4]], [[3]], [[2], [4, 4]]):
        with pytest.raises(ValueError, match=r"rows came back|completions of"):
            check_lengths(rows, wrong)


def test_rates_and_ratios_of_contestants_with_their_own_amounts() -> None:
    seconds = {"slow": [2.0, 4.0], "peer": [10.0, 10.0], "ours": [5.0, 4.0], "ours-int8": [2.0, 2.0]}
    rates = rates_of(seconds, {"slow": 8, "peer": 100, "ours": 100, "ours-int8": 100})
    assert rates == {"slow": [4, 2], "peer": [10, 10], "ours": [20, 25], "ours-int8": [50, 50]}
    assert ratios_of(rates, ["ours", "ours-int8"]) == {
        "ours / slow": [5, 12.5],
        "ours / peer": [2, 2.5],
        "ours-int8 / slow": [12.5, 25],
        "ours-int8 / peer": [5, 5],
    }
    assert rates_of({"a": [2.0], "b": [4.0]}, 8) == {"a": [4], "b": [2]}


def test_the_beginning_that_prompts_share_is_never_a_whole_prompt() -> None:
    assert common_beginning([Row([1, 2, 3], 1), Row([1, 2, 4, 5], 1)]) == [1, 2]
    assert common_beginning([Row([1, 2], 1), Row([1, 2, 4], 1)]) == [1]
    assert common_beginning([Row([3], 1), Row([4], 1)]) == []


def imports(path: Path, everywhere: bool) -> set[str]:
    """The modules that a file imports when it is loaded, or in functions too."""
    tree = ast.parse(path.read_text("utf-8"))
    found = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module or "")
    return found


def test_peers_need_nothing_but_their_own_environment() -> None:
    modules = {f"benchmarks.peers.{path.stem}": path for path in (BENCHMARKS / "peers").glob("*.py")}
    assert len(modules) > 5
    modules["benchmarks.serving"] = BENCHMARKS / "serving.py"
    for path in modules.values():
        outside = imports(path, everywhere=False) - set(modules)
        assert {name.split(".")[0] for name in outside} <= set(sys.stdlib_module_names), path.name
        assert "pagedgen" not in {name.split(".")[0] for name in imports(path, everywhere=True)}, path.name
