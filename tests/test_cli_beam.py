"""`pagedgen beam` as a user types it: results, exit codes, and one sentence for each mistake."""

import json
import os
import pty
import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from cli_cases import FIRST_COLUMNS, PROMPTS, call, sentence, write_jsonl

SMALL = ("--kv-memory", "4MiB", "--max-model-len", "128")


def beam(model, *args):
    return call("beam", *args, "-m", model, *SMALL)


def completions(name="in.completions.parquet"):
    return pq.read_table(name).to_pylist()


def test_the_best_completions_of_each_row_come_out_in_order(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    code, stdout, stderr = beam(model, "in.jsonl", "--width", 6, "--return", 3, "--max-tokens", 6, "--token-ids")
    assert (code, stdout) == (0, "")
    assert "in.completions.parquet" in stderr
    assert pq.read_table("in.completions.parquet").column_names == [
        *FIRST_COLUMNS,
        "token_ids",
        "prompt",
        "kind",
        "extra",
    ]
    rows = completions()
    assert [(row["row"], row["sample"]) for row in rows] == [(row, rank) for row in range(5) for rank in range(3)]
    for row in rows:
        assert row["status"] == "ok"
        assert row["prompt"] == PROMPTS[row["row"]]["prompt"]
        assert len(row["token_ids"]) == row["completion_tokens"] <= 6
        assert row["score"] == pytest.approx(row["cumulative_logprob"] / row["completion_tokens"], abs=1e-5)
    for first in range(0, 15, 3):
        scores = [row["score"] for row in rows[first : first + 3]]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(row["token_ids"]) for row in rows[first : first + 3]}) == 3


def test_the_manifest_and_the_statistics_tell_what_was_searched(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    beam(
        model,
        "in.jsonl",
        "--width",
        4,
        "--return",
        2,
        "--max-tokens",
        8,
        "--diversity-groups",
        2,
        "--early-stopping",
        "never",
    )
    run_folder = folder / "in.completions.parquet.run"
    parameters = json.loads((run_folder / "manifest.json").read_text())["parameters"]
    assert (parameters["width"], parameters["num_return"], parameters["early_stopping"]) == (4, 2, "never")
    assert (parameters["diversity_groups"], parameters["length_penalty"]) == (2, 1.0)
    assert parameters["max_tokens"] == 8
    stats = json.loads((run_folder / "stats.json").read_text())
    assert stats["rows_done"] == 5
    assert stats["completions_by_status"] == {"ok": 10}
    assert stats["mean_sharing_saved"] > 0


def test_beams_without_options_are_four_and_the_best_is_written(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    beam(model, "in.jsonl", "--max-tokens", 4)
    assert [row["sample"] for row in completions()] == [0] * 5
    beam(model, "in.jsonl", "--max-tokens", 4, "--width", 4, "--return", 4, "-o", "all.parquet")
    best = [row for row in completions("all.parquet") if row["sample"] == 0]
    assert [row["text"] for row in best] == [row["text"] for row in completions()]


def test_one_beam_is_greedy(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    beam(model, "in.jsonl", "--width", 1, "--max-tokens", 12, "--token-ids", "-o", "beam.parquet")
    call(
        "run",
        "in.jsonl",
        "-m",
        model,
        *SMALL,
        "--max-tokens",
        12,
        "--token-ids",
        "-o",
        "run.parquet",
        "--temperature",
        0,
    )
    names = ["id", "text", "finish_reason", "token_ids", "prompt_tokens"]
    beams, greedy = (
        [[row[name] for name in names] for row in completions(f"{how}.parquet")] for how in ("beam", "run")
    )
    assert beams == greedy


def test_a_bad_row_is_one_outcome_without_a_score(folder, model):
    lines = [json.dumps(PROMPTS[0]), "{broken", json.dumps({"prompt": "x", "min_tokens": -1}), json.dumps(PROMPTS[1])]
    (folder / "in.jsonl").write_text("\n".join(lines))
    code, _, stderr = beam(model, "in.jsonl", "--width", 2, "--return", 2, "--max-tokens", 3, "--strict")
    assert code == 3
    rows = completions()
    assert [row["row"] for row in rows] == [0, 0, 1, 2, 3, 3]
    assert [row["status"] for row in rows] == ["ok", "ok", "bad_row", "bad_row", "ok", "ok"]
    assert [row["score"] is None for row in rows] == [False, False, True, True, False, False]
    assert "min_tokens" in rows[3]["error"]
    assert "bad_row" in stderr


def test_options_of_a_row_win_and_those_of_sampling_change_nothing(folder, model):
    rows = [{"prompt": "fox", "max_tokens": 2}, {"prompt": "fox"}, {"prompt": "fox", "temperature": 1.5, "seed": 9}]
    write_jsonl(folder / "in.jsonl", rows)
    beam(model, "in.jsonl", "--width", 2, "--max-tokens", 5, "--ignore-eos", "--token-ids")
    short, plain, hot = completions()
    assert (short["completion_tokens"], plain["completion_tokens"]) == (2, 5)
    assert (hot["token_ids"], hot["score"]) == (plain["token_ids"], plain["score"])


def test_stop_strings_and_token_ids_end_completions(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS[:1])
    common = ("in.jsonl", "--width", 2, "--max-tokens", 12, "--ignore-eos", "--token-ids")
    beam(model, *common)
    (free,) = completions()
    beam(model, *common, "--stop-token-ids", free["token_ids"][2], "-o", "ids.parquet", "--early-stopping", "true")
    (ended,) = completions("ids.parquet")
    assert (ended["finish_reason"], ended["token_ids"][-1]) == ("stop", free["token_ids"][2])
    stop = next(character for character in free["text"] if character.isascii())
    beam(model, *common, "--stop", stop, "-o", "stop.parquet", "--early-stopping", "true")
    (cut,) = completions("stop.parquet")
    assert cut["finish_reason"] == "stop"
    assert stop not in cut["text"]


def test_biases_bad_words_and_penalties_steer_the_beams(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)

    def found(*args):
        options = ("--width", 3, "--max-tokens", 8, "--ignore-eos", "--token-ids", "--overwrite", *args)
        code, _, stderr = beam(model, "in.jsonl", *options)
        assert code == 0, stderr
        return completions()

    plain = found()
    first = plain[0]["token_ids"][0]
    assert [row["token_ids"] for row in found("--logit-bias", '{"77": 100}')] == [[77] * 8] * 5
    assert found("--logit-bias", f'{{"{first}": -100}}')[0]["token_ids"][0] != first
    for penalty in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert all(len(set(row["token_ids"])) == 8 for row in found(penalty, 1e6))
    text = "".join(row["text"] for row in plain)
    word = next(character for character in text if character.isascii() and character.isalpha())
    assert not any(word in row["text"] for row in found("--bad-words", word))


def test_a_column_of_log_probabilities_in_the_input_asks_for_none(folder, model):
    write_jsonl(folder / "in.jsonl", [{"prompt": "fox", "logprobs": 2}])
    assert beam(model, "in.jsonl", "--max-tokens", 3)[0] == 0
    table = pq.read_table("in.completions.parquet")
    assert table.column_names == [*FIRST_COLUMNS, "prompt", "input_logprobs", "extra"]
    assert table.to_pylist()[0]["status"] == "ok"


def test_stdin_is_read_when_it_is_piped(folder, model):
    command = [sys.executable, "-m", "pagedgen", "beam", "--width", "2", "-m", model, "--max-tokens", "2", *SMALL]
    done = subprocess.run(command, input="the quick\nbrown fox\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert [row["prompt"] for row in completions("stdin.completions.parquet")] == ["the quick", "brown fox"]


def test_on_a_terminal_without_input_the_bundled_prompts_are_searched(folder, model):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pagedgen", "beam", "--width", "8", "-m", model, "--max-tokens", "2", *SMALL]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert "bundled sample prompts" in done.stderr
    (output,) = folder.glob("*.completions.parquet")
    assert len(completions(output)) > 24


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--width", "0"], ["--width is 0", "1 to 64"]),
        (["--width", "65"], ["--width is 65", "1 to 64"]),
        (["--width", "-3"], ["--width is -3", "1 to 64"]),
        (["--return", "0"], ["--return is 0", "1 to 4", "--width"]),
        (["--return", "5"], ["--return is 5", "1 to 4", "--width"]),
        (["--width", "4", "--diversity-groups", "3"], ["--width is 4", "multiple of --diversity-groups"]),
        (["--width", "2", "--diversity-groups", "4"], ["--diversity-groups is 4", "1 to 2", "--width"]),
        (["--diversity-groups", "2", "--diversity-penalty", "-1"], ["--diversity-penalty is -1", "from 0"]),
        (["--diversity-penalty", "0.5"], ["--diversity-penalty is 0.5", "--diversity-groups"]),
        (["--length-penalty", "inf"], ["--length-penalty is inf", "from -10 to 10"]),
        (["--length-penalty", "nan"], ["--length-penalty is nan", "from -10 to 10"]),
        (["--width", "8", "--max-seqs", "4"], ["--width is 8", "4 sequences", "--max-seqs"]),
        (["--max-tokens", "0"], ["--max-tokens"]),
        (["--min-tokens", "9", "--max-tokens", "3"], ["--min-tokens"]),
        (["--logit-bias", "{11}"], ["--logit-bias", "{11}"]),
        (["--repetition-penalty", "-1"], ["--repetition-penalty"]),
        (["--keep", "nothing_there"], ["nothing_there", "kind"]),
        (["-o", "out.xlsx"], ["out.xlsx"]),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it_before_a_model_is_looked_for(folder, args, words):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    code, stdout, stderr = call("beam", "in.jsonl", *args, "-m", "nowhere/at-all")
    assert (code, stdout) == (2, ""), stderr
    message = sentence(stderr)
    for word in words:
        assert word in message
    assert [path.name for path in folder.iterdir()] == ["in.jsonl"], "a refused command leaves nothing behind"


@pytest.mark.parametrize(
    "args", [["--temperature", "1"], ["--top-k", "3"], ["--seed", "1"], ["--logprobs", "1"], ["--early-stopping", "no"]]
)
def test_what_is_no_option_of_beams_is_a_usage_error(folder, args):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    code, _, stderr = call("beam", "in.jsonl", *args)
    assert code == 2
    assert args[0] in stderr


def test_help_lists_the_options_of_beams_and_the_shared_ones():
    code, stdout, _ = call("beam", "--help")
    assert code == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", stdout)
    assert "Beam search" in shown
    for option in ("--width", "--return", "--length-penalty", "--early-stopping", "--diversity-groups"):
        assert option in shown
    for option in ("--stop-token-ids", "--template", "--kv-memory", "--output", "--keep", "--min-tokens"):
        assert option in shown
    for option in ("--temperature", "--top-p", "--seed", "--logprobs"):
        assert option not in shown
