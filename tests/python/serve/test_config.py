"""Options of a server, and its figures: limits, keys, addresses, fields, metrics, log lines."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from serve_world import Running, wait
from specrs import ConfigError
from specrs.cli import serve
from specrs.serve import Keys, ServeConfig, metrics
from specrs.serve.config import is_loopback
from specrs.serve.fields import CHAT, COMPLETIONS, TABLE, table
from specrs.serve.record import Log, Record

ROOT = Path(__file__).parents[3]
#: Parameters of `openai` 3.54.0's two `create` calls, beside those of its own (`extra_body`, `timeout`, ...).
OPENAI_CHAT = {
    "messages", "model", "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs",
    "max_completion_tokens", "max_tokens", "metadata", "modalities", "moderation", "n", "parallel_tool_calls",
    "prediction", "presence_penalty", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier", "stop", "store", "stream",
    "stream_options", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity",
    "web_search_options",
}  # fmt: skip
OPENAI_COMPLETIONS = {
    "model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n",
    "presence_penalty", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user",
}  # fmt: skip


def test_every_field_of_openai_s_requests_has_a_class() -> None:
    for endpoint, names in ((CHAT, OPENAI_CHAT), (COMPLETIONS, OPENAI_COMPLETIONS)):
        mine = [one.name for one in TABLE if endpoint in one.endpoints]
        assert len(mine) == len(set(mine)), "a field twice"
        assert names <= set(mine)


def test_the_page_has_the_tables_as_they_are() -> None:
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    assert table() in page, "python -m specrs.serve docs/serving.md"
    for one in fields(ServeConfig):
        assert f"`{one.name}`" in page, one.name


@pytest.mark.parametrize("name,value", [
    ("port", -1), ("port", 65536), ("port", "80"), ("max_n", 0), ("max_waiting", True), ("drain_seconds", -1),
    ("drain_seconds", float("nan")), ("drain_seconds", float("inf")), ("log", "all"), ("served_names", "x"),
    ("served_names", [1]), ("model", 3), ("speculative", 1), ("engine", [1]), ("cors_origins", "x"),
    ("max_prompts", 10_000), ("host", None),
])  # fmt: skip
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        ServeConfig(**{name: value})
    with pytest.raises(ConfigError, match="nonsense"):
        ServeConfig.of({"nonsense": 1})


def test_of_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nsecret\n\nsha256:" + hashlib.sha256(b"other").hexdigest() + "\n")
    config = ServeConfig.from_env({
        "SPECRS_SERVE_MODEL": "org/name", "SPECRS_SERVE_PORT": "9", "SPECRS_SERVE_ENGINE": '{"max_batch": 4}',
        "SPECRS_SERVE_CORS_ORIGINS": "http://a, http://b", "SPECRS_SERVE_SPECULATIVE": "false",
        "SPECRS_API_KEY": "k1,k2", "SPECRS_API_KEY_FILE": str(path), "HOME": "/",
    })  # fmt: skip
    assert (config.model, config.port, config.engine, config.speculative) == ("org/name", 9, {"max_batch": 4}, False)
    assert config.cors_origins == ("http://a", "http://b") and config.names == ("org/name",)
    assert [config.keys.accept(key) for key in (b"k1", b"k2", b"secret", b"other", b"k3", b"")] == [True] * 4 + [
        False
    ] * 2
    assert "secret" not in repr(config)
    for wrong in ({"SPECRS_SERVE_NONSENSE": "1"}, {"SPECRS_SERVE_PORT": "x"}, {"SPECRS_SERVE_KEYS": "x"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ServeConfig.from_env(wrong)


def test_the_command_line_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRS_SERVE_HOST", "0.0.0.0")
    monkeypatch.setenv("SPECRS_SERVE_PORT", "81")
    monkeypatch.setenv("SPECRS_SERVE_ENGINE", '{"max_batch": 4, "page_size": 8, "dtype": "float32"}')
    monkeypatch.setenv("SPECRS_API_KEY", "a")
    config = configured("--port", "82", "--max-batch", "2", "--log", "none", "--no-draft")
    assert (config.host, config.port, config.log, config.speculative) == ("0.0.0.0", 82, "none", False)
    assert config.engine == {"max_batch": 2, "page_size": 8, "dtype": "float32"} and len(config.keys.digests) == 1
    monkeypatch.undo()
    config = configured("org/name", "--tree", "2,2,4", "--served-model-name", "a", "--served-model-name", "b")
    assert config.model == "org/name" and config.names == ("a", "b") and config.host == "127.0.0.1"
    assert list(config.engine) == ["tree"] and not config.keys


def configured(*argv: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return serve.config_of(parser.parse_args(["serve", *argv]))


def test_keys_that_are_none(tmp_path: Path) -> None:
    for key in ("", "a b", "ä", "sha256:12", "a\n"):
        with pytest.raises(ConfigError, match="API key 0"):
            Keys.of([key])
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="no API key"):
        Keys.from_file(empty)


def test_a_public_address_needs_a_key() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        assert is_loopback(host)
        ServeConfig(host=host).check_address()
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", ""):
        with pytest.raises(ConfigError, match="no API key"):
            ServeConfig(host=host).check_address()
        ServeConfig(host=host, keys=Keys.of(["x"])).check_address()
        ServeConfig(host=host, allow_public_without_key=True).check_address()


def test_names_of_models(tmp_path: Path) -> None:
    assert ServeConfig().names == ("pystdlib-16m",)
    assert ServeConfig(model=str(tmp_path)).names == (tmp_path.name,)
    assert ServeConfig(model=str(tmp_path), served_names=["a", "b"]).names == ("a", "b")


def test_the_package_needs_no_server() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("starlette", "uvicorn", "prometheus_client", "httptools", "uvloop"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import specrs
from specrs.cli import main
assert main(["serve", "--port", "0"]) == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
                          env={"PYTHONPATH": ":".join(p for p in sys.path if p)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[serve]" in done.stderr and "specrs-*.whl" in done.stderr  # the name alone is on no index


def test_metrics_have_vllm_s_names_and_edges(web: Running) -> None:
    before = samples(web)
    web.complete(prompt="def f(x):", max_tokens=20, n=2, temperature=0, ignore_eos=True)
    after = samples(web)
    labels = 'engine="0",model_name="pystdlib-16m"'
    grown = {key: after[key] - before[key] for key in after if key in before}
    assert grown[f"vllm:generation_tokens_total{{{labels}}}"] == 40
    assert grown['vllm:request_success_total{engine="0",finished_reason="length",model_name="pystdlib-16m"}'] == 2
    prompt = grown[f"vllm:prompt_tokens_total{{{labels}}}"]
    assert prompt == grown[f"vllm:prefix_cache_queries_total{{{labels}}}"] > 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
                 "request_time_per_output_token_seconds", "request_inference_time_seconds"):  # fmt: skip
        assert grown[f"vllm:{name}_count{{{labels}}}"] == 1, name
    assert grown[f"vllm:request_generation_tokens_count{{{labels}}}"] == 2
    assert grown[f"vllm:inter_token_latency_seconds_count{{{labels}}}"] > 2
    # Prompts of less than a page are read twice.
    assert grown[f"vllm:iteration_tokens_total_sum{{{labels}}}"] == 40 + 2 * prompt
    assert after[f"vllm:num_preemptions_total{{{labels}}}"] >= 0
    assert after[f"vllm:kv_cache_usage_perc{{{labels}}}"] == 0
    assert after[f"vllm:num_requests_running{{{labels}}}"] == after[f"vllm:num_requests_waiting{{{labels}}}"] == 0
    assert any(key.startswith("vllm:cache_config_info{") and 'block_size="16"' in key for key in after)
    edges = [key for key in after if key.startswith("vllm:time_to_first_token_seconds_bucket")]
    assert len(edges) == len(metrics.FIRST_TOKEN) + 1 and any('le="2560.0"' in edge for edge in edges)
    assert metrics.one_two_five(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)


def samples(web: Running) -> dict[str, float]:
    answer = web.client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_a_line_for_each_request_without_its_words(web: Running) -> None:
    out = io.StringIO()

    def told() -> dict[str, dict[str, Any]]:
        whole, _, _ = out.getvalue().rpartition("\n")
        return {one["request_id"]: one for one in map(json.loads, whole.splitlines())}

    def ask(name: str, **body: Any) -> None:
        web.client.post("/v1/completions", json={"prompt": "my secret prompt", **body}, headers={"x-request-id": name})

    old, web.service.log = web.service.log, Log("requests", out)
    try:
        ask("first", max_tokens=3, n=2, ignore_eos=True)
        ask("second", stop="secret" * 300)
        web.client.get("/health", headers={"x-request-id": "mine"})
        # A line is written once its response has gone: one of an earlier test may come too.
        wait(lambda: told().keys() >= {"first", "second", "mine"})
    finally:
        web.service.log.close()
        web.service.log = old
    first, second, third = (told()[name] for name in ("first", "second", "mine"))
    assert "secret" not in out.getvalue()
    assert [(one["path"], one["status"]) for one in (first, second, third)] == [
        ("/v1/completions", 200),
        ("/v1/completions", 400),
        ("/health", 200),
    ]
    assert first["completion_tokens"] == 6 and first["finish"] == ["length"] * 2
    assert first["first_token_seconds"] > 0 and first["id"].startswith("cmpl-") and first["model"] == "pystdlib-16m"
    assert second["param"] == "stop" and "finish" not in second


def test_a_log_that_nobody_reads_stops_nobody() -> None:
    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            import time

            time.sleep(3600)
            return 0

    log = Log("requests", Stuck())
    record = Record("x", "GET", "/")
    for _ in range(10_050):
        log.write(record)
    assert log._lost >= 40
    quiet = io.StringIO()
    errors_alone = Log("errors", quiet)
    errors_alone.write(record)
    failed = Record("y", "GET", "/", status=404)
    errors_alone.write(failed)
    errors_alone.close()
    assert len(re.findall("request_id", quiet.getvalue())) == 1
