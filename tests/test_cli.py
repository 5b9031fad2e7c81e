"""`pagedgen run` as a user types it: results, exit codes, and one sentence for each mistake."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cli_cases import FIRST_COLUMNS, PROMPTS, call, run, sentence, write_jsonl

from pagedgen import __version__


def test_rows_come_out_in_order_with_the_contract_s_columns(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    code, stdout, stderr = run(model, "in.jsonl", "--max-tokens", 6)
    assert (code, stdout) == (0, "")
    assert "in.completions.parquet" in stderr
    table = pq.read_table(folder / "in.completions.parquet")
    assert table.column_names == [*FIRST_COLUMNS, "prompt", "kind", "extra"]
    rows = table.to_pylist()
    assert [row["row"] for row in rows] == list(range(5))
    for row in rows:
        assert row["status"] == "ok"
        assert row["error"] is None
        assert 1 <= row["completion_tokens"] <= 6
        assert (row["finish_reason"] == "length") == (row["completion_tokens"] == 6)
    stats = json.loads((folder / "in.completions.parquet.run" / "stats.json").read_text())
    assert stats["rows_done"] == 5
    assert stats["kernels"] in ("cpp", "torch")
    manifest = json.loads((folder / "in.completions.parquet.run" / "manifest.json").read_text())
    assert manifest["status"] == "finished"


def test_a_bad_line_is_an_outcome_and_the_run_goes_on(folder, model):
    lines = [
        json.dumps(PROMPTS[0]),
        "{broken",
        json.dumps({"prompt": "x", "temperature": -1}),
        json.dumps({"kind": "x"}),
    ]
    (folder / "in.jsonl").write_text("\n".join([*lines, json.dumps(PROMPTS[1])]))
    code, _, stderr = run(model, "in.jsonl", "-o", "out.jsonl", "--max-tokens", 3)
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert code == 0
    assert [row["status"] for row in rows] == ["ok", "bad_row", "bad_row", "bad_row", "ok"]
    assert [row["row"] for row in rows] == list(range(5))
    assert "in.jsonl line 2" in rows[1]["error"]
    assert "temperature" in rows[2]["error"]
    assert "in.jsonl line 3" in rows[2]["error"]
    assert "bad_row" in stderr


def test_strict_turns_a_bad_row_into_exit_code_3(folder, model):
    (folder / "in.jsonl").write_text('{"prompt": "x"}\n{broken\n')
    assert run(model, "in.jsonl", "--strict", "--max-tokens", 2)[0] == 3
    write_jsonl(folder / "fine.jsonl", PROMPTS)
    assert run(model, "fine.jsonl", "--strict", "--max-tokens", 2)[0] == 0


def test_options_of_a_row_win_over_the_command_line(folder, model):
    write_jsonl(folder / "in.jsonl", [{"prompt": "fox", "max_tokens": 2}, {"prompt": "fox"}])
    run(model, "in.jsonl", "--max-tokens", 5, "--ignore-eos", "--token-ids")
    table = pq.read_table("in.completions.parquet").to_pylist()
    assert [len(row["token_ids"]) for row in table] == [2, 5]
    assert [row["completion_tokens"] for row in table] == [2, 5]


def test_logprobs_are_written_and_sum_up(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS[:2])
    run(model, "in.jsonl", "--max-tokens", 4, "--ignore-eos", "--logprobs", 2)
    for row in pq.read_table("in.completions.parquet").to_pylist():
        assert len(row["logprobs"]) == 4
        assert all(len(entry["top"]) == 2 for entry in row["logprobs"])
        assert row["cumulative_logprob"] == pytest.approx(sum(entry["logprob"] for entry in row["logprobs"]), abs=1e-4)
        # The model is greedy by default: what was chosen is what is likeliest.
        assert all(entry["token_id"] == entry["top"][0]["token_id"] for entry in row["logprobs"])


def test_samples_of_a_row_stand_together_each_with_its_own_draws(folder, model):
    write_jsonl(folder / "in.jsonl", [*PROMPTS[:2], {"prompt": "fox", "n": 2}, {"prompt": "x", "n": 0}])
    options = ("--max-tokens", 12, "--temperature", 1, "--ignore-eos")
    assert run(model, "in.jsonl", "-n", 3, *options)[0] == 0
    rows = pq.read_table("in.completions.parquet").to_pylist()
    keys = [(row["row"], row["sample"]) for row in rows]
    assert keys == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0)]
    assert [row["status"] for row in rows] == ["ok"] * 8 + ["bad_row"]
    assert len({row["text"] for row in rows[:3]}) == 3
    assert json.loads((folder / "in.completions.parquet.run" / "stats.json").read_text())["rows_done"] == 4
    run(model, "in.jsonl", *options, "-o", "one.parquet")
    assert pq.read_table("one.parquet").to_pylist()[0]["text"] == rows[0]["text"]


def test_biases_bad_words_and_penalties_reach_the_engine(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS[:1])

    def completion(*args):
        code, _, stderr = run(model, "in.jsonl", "--max-tokens", 8, "--ignore-eos", "--token-ids", "--overwrite", *args)
        assert code == 0, stderr
        return pq.read_table("in.completions.parquet").to_pylist()[0]

    plain = completion()
    first = plain["token_ids"][0]
    assert completion("--logit-bias", f'{{"{first}": -100}}')["token_ids"][0] != first
    assert completion("--logit-bias", '{"77": 100}')["token_ids"] == [77] * 8
    assert 77 not in completion("--logit-bias", '{"77": 100}', "--repetition-penalty", 1e6)["token_ids"][1:]
    for option in ("--presence-penalty", "--frequency-penalty"):
        assert len(set(completion(option, 1e6)["token_ids"])) == 8
    word = next(character for character in plain["text"] if character.isascii() and character.isalpha())
    assert word not in completion("--bad-words", word)["text"]


def test_log_probabilities_of_the_prompt_are_written(folder, model):
    write_jsonl(folder / "in.jsonl", [{"prompt_token_ids": [5, 6, 7, 8]}])
    run(model, "in.jsonl", "--max-tokens", 2, "--prompt-logprobs", 1)
    (row,) = pq.read_table("in.completions.parquet").to_pylist()
    assert [entry["token_id"] for entry in row["prompt_logprobs"]] == [6, 7, 8]
    assert all(entry["logprob"] <= entry["top"][0]["logprob"] for entry in row["prompt_logprobs"])


def test_every_way_to_give_a_prompt(folder, model):
    write_jsonl(
        folder / "in.jsonl",
        [
            {"messages": [{"role": "user", "content": "the fox"}]},
            {"prompt": "the fox"},
            {"prompt_token_ids": [5, 6, 7]},
        ],
    )
    run(model, "in.jsonl", "--max-tokens", 2)
    chat, text, ids = pq.read_table("in.completions.parquet").to_pylist()
    assert chat["prompt_tokens"] == text["prompt_tokens"] > 5  # a text is one user message
    assert ids["prompt_tokens"] == 3
    (folder / "questions.csv").write_text("question,name\nthe fox,A\n")
    run(model, "questions.csv", "--prompt-column", "question", "--raw", "-o", "a.parquet", "--max-tokens", 2)
    run(model, "questions.csv", "--template", "{{ question }}{{ name }}", "--raw", "-o", "b.parquet", "--max-tokens", 2)
    (folder / "template.txt").write_text("{{ question }}{{ name }}")
    run(model, "questions.csv", "--template", "template.txt", "--raw", "-o", "c.parquet", "--max-tokens", 2)
    column, inline, file = (pq.read_table(f"{name}.parquet").to_pylist()[0] for name in "abc")
    assert column["prompt_tokens"] < inline["prompt_tokens"] == file["prompt_tokens"]


def test_a_folder_as_output_holds_parts(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    assert run(model, "in.jsonl", "-o", "out", "--max-tokens", 2)[0] == 0
    assert pq.read_table(folder / "out").num_rows == 5
    assert [path.name for path in (folder / "out").iterdir()] == ["part-00000.parquet"]


def test_too_long_prompts_are_refused_or_truncated(folder, model):
    write_jsonl(folder / "in.jsonl", [{"prompt_token_ids": [9] * 200}, {"prompt_token_ids": [9] * 20}])
    run(model, "in.jsonl", "-o", "a.parquet", "--max-tokens", 8)
    long, short = pq.read_table("a.parquet").to_pylist()
    assert (long["status"], short["status"]) == ("too_long", "ok")
    assert "200 tokens" in long["error"]
    run(model, "in.jsonl", "-o", "b.parquet", "--max-tokens", 8, "--ignore-eos", "--on-too-long", "truncate-left")
    long, short = pq.read_table("b.parquet").to_pylist()
    assert (long["status"], long["prompt_tokens"], long["completion_tokens"]) == ("ok", 120, 8)


def test_what_never_fits_the_pool_is_unfit(folder, model):
    write_jsonl(
        folder / "in.jsonl", [{"prompt_token_ids": [9] * 20, "max_tokens": 100}, {"prompt": "a", "max_tokens": 2}]
    )
    code, _, _ = call("run", "in.jsonl", "-m", model, "--kv-memory", "16KiB", "--max-model-len", 128)
    big, small = pq.read_table("in.completions.parquet").to_pylist()
    assert (code, big["status"], small["status"]) == (0, "unfit", "ok")
    assert big["error"].startswith("in.jsonl line 1: ")
    assert "--kv-memory" in big["error"]


def test_stdin_is_read_when_it_is_piped(folder, model):
    (folder / "in.txt").write_text("the quick\nbrown fox\n")
    with open("in.txt", "rb") as stdin:
        done = subprocess.run(
            [sys.executable, "-m", "pagedgen", "run", "-m", model, "--max-tokens", "2", "--kv-memory", "4MiB"],
            stdin=stdin,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "\x1b" not in done.stderr
    assert pq.read_table("stdin.completions.parquet").column("prompt").to_pylist() == ["the quick", "brown fox"]


def test_quiet_shows_nothing(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    assert run(model, "in.jsonl", "--quiet", "--max-tokens", 2) == (0, "", "")


def test_the_same_command_twice_finds_all_done_another_is_refused_and_overwrite_allows_it(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    assert run(model, "in.jsonl", "--max-tokens", 2)[0] == 0
    code, _, stderr = run(model, "in.jsonl", "--max-tokens", 2)
    assert code == 0
    assert "in.completions.parquet is complete already" in stderr
    code, _, stderr = run(model, "in.jsonl", "--max-tokens", 3)
    assert code == 2
    for words in ("--max-tokens was 2, now it is 3", "--overwrite", "another -o"):
        assert words in sentence(stderr)
    assert run(model, "in.jsonl", "--max-tokens", 3, "--overwrite")[0] == 0


def test_strict_counts_the_rows_of_earlier_processes(folder, model):
    write_jsonl(folder / "in.jsonl", [{"prompt": "fox"}, {}])
    assert run(model, "in.jsonl", "--max-tokens", 2)[0] == 0
    assert run(model, "in.jsonl", "--max-tokens", 2, "--strict")[0] == 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--retry", "broken"], ["broken", "bad_row"]),
        (["--max-errors", "many"], ["many", "5%"]),
        (["--max-errors", "100%"], ["100%"]),
        (["--flush-every", "soon"], ["soon", "30s"]),
        (["--flush-every", "0s"], ["0s"]),
    ],
)
def test_a_value_that_cannot_be_read_is_a_usage_error(folder, args, words):
    code, _, stderr = call("run", "in.jsonl", *args)
    assert code == 2
    for word in words:
        assert word in stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nowhere.jsonl"], 2, ["nowhere.jsonl"]),
        (["in.jsnl"], 2, ["in.jsnl", "in.jsonl"]),
        (["empty.jsonl"], 2, ["empty.jsonl"]),
        (["dangling.jsonl"], 2, ["dangling.jsonl is a link to nowhere, which does not exist"]),
        ([""], 2, ["the name of the input is empty"]),
        ([" "], 2, ["the name of the input is empty"]),
        (["--dataset", ""], 2, ["--dataset is empty"]),
        (["in.jsonl", "-o", ""], 2, ["-o is empty"]),
        (["in.jsonl", "-m", ""], 2, ["--model is empty"]),
        (["in.jsonl", "--template", ""], 2, ["--template is empty"]),
        (["in.jsonl", "--keep", ""], 2, ["--keep is empty"]),
        (["in.jsonl", "--logit-bias", ""], 2, ["--logit-bias is empty"]),
        (["/dev/null"], 2, ["/dev/null is empty"]),
        (["image.png"], 2, ["image.png"]),
        (["questions.csv"], 2, ["question", "name", "--prompt-column"]),
        (["in.jsonl", "--prompt-column", "promt"], 2, ["promt", "prompt"]),
        (["in.jsonl", "--template", "{{ prompt"], 2, ["--template"]),
        (["in.jsonl", "--template", "nowhere.txt"], 2, ["--template", "nowhere.txt"]),
        (["in.jsonl", "-o", "in.jsonl", "--overwrite"], 2, ["in.jsonl", "-o"]),
        (["in.jsonl", "-o", "exists.parquet"], 2, ["exists.parquet", "--overwrite"]),
        (["in.jsonl", "-o", "full"], 2, ["full", "--overwrite"]),
        (["in.jsonl", "-o", "mixed", "--overwrite"], 2, ["mixed", "other.parquet"]),
        (["in.jsonl", "-o", "-"], 2, ["standard output"]),
        (["in.jsonl", "-o", "out.xlsx"], 2, ["out.xlsx"]),
        (["in.jsonl", "-o", "/proc/out.parquet"], 2, ["/proc/out.parquet", "nothing can be made in /proc", "-o"]),
        (["in.jsonl", "-o", "/proc/out/"], 2, ["/proc/out", "nothing can be made in /proc", "-o"]),
        (["in.jsonl", "-o", "/dev/null/out.parquet"], 2, ["/dev/null", "not a folder", "-o"]),
        (["in.jsonl", "-o", "a" * 245 + ".parquet"], 2, ["aaa", "check the path"]),
        (["in.jsonl", "--keep", "nothing_there"], 2, ["nothing_there", "kind"]),
        (["in.jsonl", "--temperature", "-1"], 2, ["--temperature"]),
        (["in.jsonl", "--top-p", "1.5"], 2, ["--top-p"]),
        (["in.jsonl", "--max-tokens", "0"], 2, ["--max-tokens"]),
        (["in.jsonl", "--min-tokens", "9", "--max-tokens", "3"], 2, ["--min-tokens"]),
        (["in.jsonl", "-m", "nowhere/at-all"], 2, ["nowhere/at-all"]),
        (["in.jsonl", "-m", "full"], 2, ["full", "config.json"]),
        (["in.jsonl", "-m", "image.png"], 2, ["image.png"]),
        (["in.jsonl", "--dataset", "x"], 2, ["--dataset"]),
        (["in.jsonl", "--split", "x"], 2, ["--split"]),
        (["--split", "x"], 2, ["--split", "--dataset"]),
        (["a question instead of a path " * 20], 2, ["a question", "check the path"]),
        (["in.jsonl", "-o", "a" * 300 + ".parquet"], 2, ["aaa", "check the path"]),
        (["~nobody-here/in.jsonl"], 2, ["~nobody-here"]),
        (["in.jsonl", "-m", "b" * 300], 2, ["bbb", "check the path"]),
        (["in.jsonl", "--raw", "--system", "hi"], 2, ["--system", "--raw"]),
        (["in.jsonl", "--stop-token-ids", "999999"], 2, ["--stop-token-ids", "999999"]),
        (["in.jsonl", "--logit-bias", '{"999999": 1}'], 2, ["--logit-bias", "999999"]),
        (["in.jsonl", "--top-k", "1000000000"], 2, ["--top-k is 1000000000"]),
        (["in.jsonl", "--logit-bias", "{11}"], 2, ["--logit-bias", "{11}"]),
        (["in.jsonl", "-n", "0"], 2, ["-n is 0"]),
        (["in.jsonl", "-n", "8", "--max-seqs", "4"], 2, ["-n is 8", "--max-seqs"]),
        (["in.jsonl", "--repetition-penalty", "0"], 2, ["--repetition-penalty"]),
        (["in.jsonl", "--presence-penalty", "nan"], 2, ["--presence-penalty"]),
        (["in.jsonl", "--bad-words", ""], 2, ["--bad-words"]),
        (["in.jsonl", "--max-batch-tokens", "9" * 30], 2, ["max_batch_tokens"]),
        (["in.jsonl", "--kv-memory", "1MiB", "--max-seqs", "1000000000000"], 2, ["the most that fits is --max-seqs"]),
        (["in.jsonl", "--kv-memory", "100B"], 2, ["--kv-memory"]),
        (["in.jsonl", "--kv-memory", "900TiB"], 2, ["--kv-memory"]),
        (["in.jsonl", "--max-model-len", "100000"], 2, ["--max-model-len"]),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(folder, model, args, code, words, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_jsonl(folder / "in.jsonl", PROMPTS)
    (folder / "empty.jsonl").touch()
    (folder / "dangling.jsonl").symlink_to("nowhere")
    (folder / "image.png").write_bytes(b"\x89PNG\r\n")
    (folder / "questions.csv").write_text("question,name\nwhy?,A\n")
    (folder / "exists.parquet").touch()
    (folder / "mixed").mkdir()
    (folder / "mixed" / "other.parquet").touch()
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").touch()
    if "-m" not in args:
        args = [*args, "-m", model]
    before = sorted(path.name for path in folder.rglob("*"))
    found, stdout, stderr = call("run", *args)
    assert (found, stdout) == (code, ""), stderr
    message = sentence(stderr)
    for word in words:
        assert word in message
    assert sorted(path.name for path in folder.rglob("*")) == before, "a refused command leaves nothing behind"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_that_cannot_be_written_is_refused(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    (folder / "locked").mkdir(mode=0o500)
    code, _, stderr = run(model, "in.jsonl", "-o", "locked/out.parquet")
    assert code == 2
    assert "locked" in sentence(stderr)


def test_an_unknown_option_and_a_bad_size_are_usage_errors(folder):
    assert call("run", "--nonsense")[0] == 2
    code, _, stderr = call("run", "--kv-memory", "much")
    assert code == 2
    assert "much" in stderr
    assert call("run", "--block-size", "0")[0] == 2


def test_version_and_help():
    assert call("--version") == (0, f"pagedgen {__version__}\n", "")
    code, stdout, _ = call("run", "--help")
    assert code == 0
    for option in ("--kv-memory", "--template", "--stop-token-ids", "--no-prefix-cache", "--on-too-long"):
        assert option in re.sub(r"\x1b\[[0-9;]*m", "", stdout)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGTERM] * 2, [signal.SIGHUP]])
def test_a_run_that_is_told_to_end_keeps_what_is_finished(folder, model, signals):
    """It is told once its first rows are done, twice within a moment too, as `timeout` does; it exits with 130 and says
    how to go on."""
    write_jsonl(folder / "in.jsonl", [{"prompt": f"fox {i}"} for i in range(20_000)])
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pagedgen",
            "run",
            "in.jsonl",
            "-m",
            model,
            "--ignore-eos",
            "--max-tokens",
            "20",
            "--max-seqs",
            "8",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (folder / "in.completions.parquet.run" / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.001)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    command = "pagedgen run in.jsonl -m " + model + " --ignore-eos --max-tokens 20 --max-seqs 8"
    assert f"to go on: {command}\n" in stderr
    run_folder = Path("in.completions.parquet.run")
    status = json.loads((run_folder / "manifest.json").read_text())["status"]
    rows = int(re.search(r"interrupted after (\d+) rows, which are safe", stderr)[1])
    assert status == "interrupted"
    assert rows > 0
    assert pq.read_table(run_folder / "parts").num_rows == rows
    kept = [row for part in (run_folder / "parts").glob("part-*") for row in pq.read_table(part)["row"].to_pylist()]
    assert len(kept) == len(set(kept))


def test_a_reader_of_the_progress_that_goes_away_does_not_stop_the_run(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pagedgen", "run", "in.jsonl", "-m", model, "--max-tokens", "2"]
    assert subprocess.run(command, stderr=write).returncode == 0
    os.close(write)
    assert pq.read_table("in.completions.parquet").num_rows == 5
    closed = 'exec "$0" "$@" --overwrite <&- 2>&-'
    assert subprocess.run(["sh", "-c", closed, *command]).returncode == 0
