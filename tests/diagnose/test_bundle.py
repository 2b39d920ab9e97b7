"""The bundle holds what a report needs and no secret."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path

import pytest

from dflashctl.diagnose import bundle
from dflashctl.diagnose.evidence import diagnose_paths


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("HF_TOKEN=hf_abcdefghijklmnop", "hf_abcdefghijklmnop"),
        ('{"wandb_api_key": "0123456789abcdef0123456789abcdef01234567"}', "0123456789abcdef"),
        ("export AWS_SECRET_ACCESS_KEY='abc/def+ghi'", "abc/def+ghi"),
        ("password: hunter22", "hunter22"),
        ("--token s3cr3t-value x", "s3cr3t-value"),
        ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
        ("clone https://me:pa55word@git.local/x", "pa55word"),
        ("using sk-abcdefghijkl", "sk-abcdefghijkl"),
        ('["--api-key", "zzzzzzzz"]', "zzzzzzzz"),
        ('"argv": [\n   "--hf-token",\n   "zzzzzzzz"\n  ]', "zzzzzzzz"),
        ("x=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4", "eyJzdWIiOiIxMjM0In0"),
        ("posting to https://hooks.slack.com/services/T000/B000/XXXXsecretXXXX", "XXXXsecretXXXX"),
        ("GET https://b.s3.amazonaws.com/x?X-Amz-Signature=0123abcd4567 200", "0123abcd4567"),
        ("using AIzaSyA1234567890abcdefghij", "AIzaSyA1234567890"),
        ("-----BEGIN PRIVATE KEY-----\nMIIcut", "MIIcut"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----", "MIIabc"),
    ],
)
def test_secrets_are_hidden(text: str, secret: str) -> None:
    assert secret not in bundle.without_secrets(text)
    assert bundle.HIDDEN in bundle.without_secrets(text)


@pytest.mark.parametrize(
    "text", ["max_tokens=512", "tokens: 4096", "step 3 | loss 2.0 | tok/s 98,000", "pad_token_id: 151643"]
)
def test_counts_stay(text: str) -> None:
    assert bundle.without_secrets(text) == text


def test_what_is_in_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    kernel = "[1.0] NVRM: Xid (PCI:0000:41:00): 79, pid=0, GPU has fallen off the bus."
    (run / "run.log").write_text(f"HF_TOKEN=hf_abcdefghijklmnop\nstep 1 | loss 2.0\n{kernel}\n")
    (run / "manifest.json").write_text(
        '{"run_id": "x", "argv": ["--api-key", "zzzzzzzz"], "api_key": "qqqqqqqq"}'
    )
    (run / "state.json").write_text('{"status": "exited", "exit_code": 1}')
    found = diagnose_paths([run])
    target = tmp_path / "b.tar"
    names = bundle.write(target, found, {"exit_code": 1}, bundle.collect([run]))
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with tarfile.open(target) as tar:
        texts = {
            m.name.removeprefix("dflash-diagnosis/"): (tar.extractfile(m) or target.open("rb"))
            .read()
            .decode()
            for m in tar
        }
    assert sorted(texts) == names
    assert json.loads(texts["diagnosis.json"])["class"] == "gpu-fell-off-bus"
    assert "Xid" in texts["kernel.txt"]
    assert "step 1" in texts["logs/run.log"]
    assert {"manifest.json", "state.json", "facts.json", "versions.txt"} <= set(texts)
    assert not any(s in "".join(texts.values()) for s in ("hf_abcdefghijklmnop", "qqqqqqqq", "zzzzzzzz"))
