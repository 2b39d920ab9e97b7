"""What trainers and launchers write again and again: lines of progress, torchrun's reports, frames."""

from __future__ import annotations

import json
import random

SITES = (
    "/opt/conda/lib/python3.10/site-packages/",
    "/usr/local/lib/python3.11/dist-packages/",
    "/opt/venv/lib/python3.12/site-packages/",
    "/home/me/miniconda3/envs/tr/lib/python3.9/site-packages/",
    "/root/.venv/lib/python3.13/site-packages/",
)
LIBRARIES = (
    "torch/", "transformers/", "datasets/", "accelerate/", "lightning/", "pytorch_lightning/", "deepspeed/", "triton/",
    "huggingface_hub/", "safetensors/", "numpy/", "PIL/", "wandb/", "peft/", "trl/", "flash_attn/", "megatron/", "requests/",
    "ultralytics/",
)  # fmt: skip
STANDARD = (
    "threading.py", "multiprocessing/", "json/", "socket.py", "shutil.py", "os.py", "copy.py", "concurrent/", "queue.py",
    "pathlib.py",
)  # fmt: skip
SIGNALS = {-9: "SIGKILL", -11: "SIGSEGV", -6: "SIGABRT", -7: "SIGBUS"}
ELASTIC = "torch/distributed/elastic/multiprocessing/api.py"
HEADS = {
    "new": ("W1129 04:58:35.310000 {pid} " + ELASTIC + ":897] ", "E1129 04:58:36.120000 {pid} " + ELASTIC + ":869] "),
    "mid": (
        "[2024-11-29 04:58:35,310] torch.distributed.elastic.multiprocessing.api: [WARNING] ",
        "[2024-11-29 04:58:36,120] torch.distributed.elastic.multiprocessing.api: [ERROR] ",
    ),
    "old": (
        "WARNING:torch.distributed.elastic.multiprocessing.api:",
        "ERROR:torch.distributed.elastic.multiprocessing.api:",
    ),
}  # fmt: skip
"""What stands before torchrun's warnings and errors, by its age."""
BARS = ("tqdm", "light", "yolo")


def steps(rng: random.Random, style: str, start: int, count: int, every: int = 10) -> list[str]:
    """Progress from step `start` on; bars are one line of many frames."""
    loss = rng.uniform(1.9, 3.2)
    out: list[str] = []
    for step in range(start, start + count * every, every):
        loss *= rng.uniform(0.975, 1.003)
        out += _step(rng, style, step, loss)
    return ["".join("\r" + frame for frame in out)] if style in BARS else out


def _step(rng: random.Random, style: str, step: int, loss: float) -> list[str]:
    norm, rate = rng.uniform(0.3, 2), rng.uniform(20, 30)
    clock = f"{(3 + step // 3600) % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d}"
    stamp = f"2026-11-29 {clock},{rng.randint(100, 999)}"
    done = f"{step // 200:3d}%|{'█' * (step // 2000 + 1):<10}| {step}/20000 [{step // 60:02d}:{step % 60:02d}<5:12:33"
    if style == "plain":
        tokens = f"{rng.randint(380, 420)},{rng.randint(100, 999)}"
        return [f"step {step} | loss {loss:.4f} | lr 2.00e-05 | grad_norm {norm:.3f} | tok/s {tokens}"]
    if style == "short":
        return [f"step {step} loss {loss:.4f}"]
    if style == "hf":
        values = {"loss": round(loss, 4), "grad_norm": round(norm, 6), "learning_rate": 2e-05}
        return [str({**values, "epoch": round(step / 5000, 2)})]
    if style == "hf5":
        texts = {"loss": f"{loss:.4f}", "grad_norm": f"{norm:.4f}", "learning_rate": "1.2e-05"}
        return [str({**texts, "epoch": f"{step / 5000:.2f}"})]
    if style == "megatron":
        return [
            f" [2026-11-29 {clock}.100000] iteration {step:8d}/  250000 | consumed samples: {step * 1024:12d} | elapsed time per "
            f"iteration (ms): {rng.uniform(2100, 2300):.1f} | learning rate: 1.200000E-04 | lm loss: "
            f"{loss:.6E} | loss scale: 1.0 | grad norm: {norm:.3f} | number of nan iterations:   0 |"
        ]
    if style == "ds":
        return [
            f"[{stamp}] [INFO] [logging.py:128:log_dist] [Rank 0] step={step}, skipped=0, lr=[1e-05], mom=[[0.9, 0.95]]",
            f"[{stamp}] [INFO] [timer.py:260:stop] epoch=0/micro_step={step * 4}/global_step={step}, "
            f"RunningAvgSamplesPerSec={rate:.4f}, CurrSamplesPerSec={rate:.4f}, MemAllocated=21.2GB, MaxMemAllocated=55.1GB",
        ]
    if style == "titan":
        return [
            f"[rank0]:[titan] {stamp} - root - INFO - step: {step:5d}  loss: {loss:7.4f}  grad_norm: {norm:7.4f}  "
            f"memory: 61.2GiB(77.3%)  tps: {rng.randint(6000, 7000):,}  tflops: 350.12  mfu: 35.40%"
        ]
    if style == "epoch":
        return [
            f"Epoch: [1][{step:5d}/5004]\tTime  0.301 ( 0.312)\tData  0.101 ( 0.1)\tLoss {loss:.4e} ({loss:.4e})\tAcc@1  31.00"
        ]
    if style == "log":
        return [f"{stamp} INFO train.loop: it={step} loss={loss:.4f} lr=2.0e-05 ips={rate / 2:.2f}"]
    if style == "json":
        values = {"ts": f"2026-11-29T{clock}Z", "event": "step", "step": step, "loss": round(loss, 4)}
        return [json.dumps({**values, "err": round(rng.random() / 9, 4)})]
    if style == "tqdm":
        return [f" {done},  {rng.uniform(1, 2):.2f}s/it]"]
    if style == "light":
        return [f"Epoch 3:  {done},  {rng.uniform(1, 2):.2f}it/s, v_num=12, train/loss={loss:.3f}]"]
    assert style == "yolo", style
    return [
        f"      3/100      9.7G     {loss:.3f}      1.204      1.107        41        640:  {done},  5.6it/s]"
    ]


def banner() -> list[str]:
    """What torchrun writes where OMP_NUM_THREADS is not set."""
    head = "W1129 03:09:57.114000 4120 torch/distributed/run.py:792] "
    said = (
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid overload"
    )
    return [
        head,
        head + "*" * 41,
        f"{head}{said}, please further tune the variable as needed. ",
        head + "*" * 41,
    ]


def epilogue(rng: random.Random, script: str, rank: int, code: int, world: int, style: str) -> list[str]:
    """torchrun ends the other ranks, and reports the first that failed."""
    pid = rng.randint(2000, 60000)
    warning, error = (head.format(pid=pid - 9) for head in HEADS[style])
    site = rng.choice(SITES)
    signal = SIGNALS.get(code, "")
    said = f"Signal {-code} ({signal}) received by PID {pid + rank}"
    if not signal:
        said = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    return [
        *(f"{warning}Sending process {pid + r} closing signal SIGTERM" for r in range(world) if r != rank),
        f"{error}failed (exitcode: {code}) local_rank: {rank} (pid: {pid + rank}) of binary: /opt/conda/bin/python3",
        "Traceback (most recent call last):",
        '  File "/opt/conda/bin/torchrun", line 33, in <module>',
        "    sys.exit(main())",
        f'  File "{site}torch/distributed/launcher/api.py", line 277, in launch_agent',
        "    raise ChildFailedError(",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        f"{script} FAILED",
        "-" * 60,
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "-" * 60,
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-29_04:58:35",
        "  host      : node-a",
        f"  rank      : {rank} (local_rank: {rank})",
        f"  exitcode  : {code} (pid: {pid + rank})" + (f" ({signal})" if signal else ""),
        "  error_file: <N/A>",
        f"  traceback : {said}",
        "=" * 60,
    ]


def frame(site: str, spec: str, *, carets: bool = False) -> list[str]:
    """Of `FILE:LINE FUNCTION | CODE`; files of libraries get their folder, others the program's."""
    where, _, code = spec.partition(" | ")
    place, function = where.split(" ")
    path, _, line = place.rpartition(":")
    if path.startswith(LIBRARIES):
        path = site + path
    elif path.startswith(STANDARD):
        path = site.rsplit("/", 2)[0] + "/" + path
    elif not path.startswith("/"):
        path = "/data/proj/" + path
    out = [f'  File "{path}", line {line}, in {function}']
    if code:
        out.append("    " + code)
    if code and carets:
        out.append("    " + "^" * len(code))
    return out
