"""OpenAI batch files: recognised by themselves, and answered in the batch API's shape."""

import json

import pyarrow.parquet as pq
from cli_cases import run, sentence, write_jsonl

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def request(custom_id, url=CHAT, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "gpt-4o-mini", **body}}


REQUESTS = [
    request("a", messages=[{"role": "user", "content": "the quick fox"}], max_tokens=3),
    request("b", TEXT, prompt="the quick fox", max_tokens=4, logprobs=2),
    request("c", messages=[{"role": "user", "content": "fox"}], max_completion_tokens=2, n=2, temperature=0.9, seed=4),
    request("d", messages=[{"role": "user", "content": "fox"}], tools=[{"type": "function"}]),
    request("e", "/v1/embeddings", input="fox"),
]


def test_rows_are_recognised_and_completed_as_their_bodies_say(folder, model):
    write_jsonl(folder / "in.jsonl", REQUESTS)
    code, _, stderr = run(model, "in.jsonl", "--ignore-eos", "--token-ids")
    assert code == 0
    assert stderr.count("asks for the model gpt-4o-mini; all rows are completed by the one of --model") == 1
    rows = pq.read_table("in.completions.parquet").to_pylist()
    assert [(row["id"], row["sample"], row["status"], row["completion_tokens"]) for row in rows] == [
        ("a", 0, "ok", 3),
        ("b", 0, "ok", 4),
        ("c", 0, "ok", 2),
        ("c", 1, "ok", 2),
        ("d", 0, "bad_row", 0),
        ("e", 0, "bad_row", 0),
    ]
    assert "in.jsonl line 4" in rows[4]["error"]
    assert "tools" in rows[4]["error"]
    assert len(rows[1]["logprobs"]) == 4
    assert rows[0]["url"] == CHAT
    # The same prompt, once through the chat template and once as it is.
    assert rows[0]["prompt_tokens"] > rows[1]["prompt_tokens"]


def test_a_completion_request_is_what_raw_gives(folder, model):
    write_jsonl(folder / "batch.jsonl", [request("b", TEXT, prompt="the quick fox", max_tokens=6)])
    write_jsonl(folder / "raw.jsonl", [{"id": "b", "prompt": "the quick fox"}])
    run(model, "batch.jsonl", "--token-ids")
    run(model, "raw.jsonl", "--raw", "--max-tokens", 6, "--token-ids")
    batch, raw = (pq.read_table(f"{name}.completions.parquet").to_pylist()[0] for name in ("batch", "raw"))
    assert batch["token_ids"] == raw["token_ids"]
    assert batch["prompt_tokens"] == raw["prompt_tokens"]


def test_answers_in_the_batch_api_s_shape(folder, model):
    write_jsonl(folder / "in.jsonl", REQUESTS)
    code, _, _ = run(model, "in.jsonl", "-o", "out.jsonl", "--format", "openai", "--ignore-eos")
    assert code == 0
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["a", "b", "c", "d", "e"]
    assert [set(line) for line in lines] == [{"id", "custom_id", "response", "error"}] * 5
    bodies = [line["response"]["body"] for line in lines[:3]]
    assert [line["response"]["status_code"] for line in lines[:3]] == [200] * 3
    assert [body["object"] for body in bodies] == ["chat.completion", "text_completion", "chat.completion"]
    assert [len(body["choices"]) for body in bodies] == [1, 1, 2]
    assert bodies[0]["choices"][0]["message"]["role"] == "assistant"
    assert {body["model"] for body in bodies} == {model}
    logprobs = bodies[1]["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 4
    assert not any("Ġ" in token for token in logprobs["tokens"])
    assert bodies[2]["usage"]["completion_tokens"] == 4
    for line in lines[3:]:
        assert line["response"] is None
        assert line["error"]["code"] == "bad_row"
    before = (folder / "out.jsonl").read_bytes()
    assert run(model, "in.jsonl", "-o", "out.jsonl", "--format", "openai", "--ignore-eos")[0] == 0
    assert (folder / "out.jsonl").read_bytes() == before


def test_plain_rows_can_be_answered_in_that_shape_too(folder, model):
    write_jsonl(folder / "in.jsonl", [{"prompt": "fox"}, {"nothing": 1}])
    assert run(model, "in.jsonl", "-o", "out.jsonl", "--format", "openai", "--max-tokens", 2)[0] == 0
    chat, bad = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert (chat["custom_id"], chat["response"]["body"]["object"]) == ("0", "chat.completion")
    assert bad["error"]["code"] == "bad_row"


def test_the_format_needs_a_json_lines_output(folder, model):
    write_jsonl(folder / "in.jsonl", [{"prompt": "fox"}])
    code, _, stderr = run(model, "in.jsonl", "--format", "openai")
    assert code == 2
    assert "-o X.jsonl" in sentence(stderr)
    code, _, stderr = run(model, "in.jsonl", "-o", "o.jsonl", "--format", "openai", "--keep", "none")
    assert code == 2
    assert "--keep" in sentence(stderr)
