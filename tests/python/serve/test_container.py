"""Names in the Containerfile exist: files that it copies, the extra that it installs, variables that it sets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")


def test_what_it_copies_exists() -> None:
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.M) for name in line.split()[:-1]]
    assert len(copied) > 8
    for name in copied:
        assert (ROOT / name).exists(), name
    cargo = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    for path in re.findall(r'^path = "([^"]+)"', cargo, re.M):  # a target that is not there stops cargo
        assert path.split("/")[0] in copied, path


def test_its_compiler_is_new_enough() -> None:
    needed = re.search(r'^rust-version = "(\d+)\.(\d+)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.M)
    given = re.search(r"^FROM rust:(\d+)\.(\d+)", TEXT, re.M)
    assert needed and given and tuple(map(int, given.groups())) >= tuple(map(int, needed.groups()))


def test_the_server_knows_its_variables() -> None:
    pytest.importorskip("uvicorn", reason="the extra specrs[serve] is not installed")
    from specrs.serve import ServeConfig

    given = dict(re.findall(r"\b(SPECRS_SERVE_\w+)=(\S+)", TEXT))
    assert given.keys() >= {"SPECRS_SERVE_HOST", "SPECRS_SERVE_PORT"}
    config = ServeConfig.from_env(given)
    assert (config.host, config.port) == ("0.0.0.0", 8000) and "EXPOSE 8000" in TEXT
    assert '"specrs", "serve"' in TEXT and "[serve]" in TEXT
