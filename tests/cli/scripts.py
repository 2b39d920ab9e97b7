"""Trainers small enough for a test: they write events and log lines as the real one does."""

HEAD = """
import json, os, signal, sys, time
run = sys.argv[1]
events = open(run + "/events.jsonl", "a")
def emit(event, line=None, **fields):
    events.write(json.dumps({"t": time.time(), "event": event, **fields}) + "\\n"); events.flush()
    if line: print(line, flush=True)
def step(n, steps):
    emit("step", f"step {n}/{steps}  loss {4 - n / steps:.3f}", step=n, steps=steps, epoch=0.1, loss=4 - n / steps,
         eal=2.5, lr=1e-3, grad_norm=1.0, samples_per_s=8.0, step_s=0.05, data_wait=0.0, target_wait=0.0,
         drafter_wait=0.0, exchange_wait=0.0)
def load():
    emit("start", "dflash trainer: torch 0, python 3, 1 target, 1 drafter, seed 0", run_id="x")
    emit("dataset", "Loaded dataset: 8 samples", samples=8, seconds=0.1)
    emit("buckets", "Batch buckets: 1 (64..64), padding 0.0 %", buckets=[{"length": 64, "samples": 8}], padding=0.0)
    emit("targets_loading", "Loading 1 target model...", count=1)
    emit("target_ready", index=0, device="cpu", seconds=0.1)
    emit("drafters_starting", "Starting drafter loops...", count=1, parameters=10)
    emit("drafter_ready", "Drafter 0 ready (warmed up in 0.1 s)", index=0, device="cpu", seconds=0.1, compiled=False)
"""
FINISHES = (
    HEAD
    + """
load()
for n in range(1, 4): step(n, 3)
emit("end", "Run finished at step 3", status="finished", step=3)
"""
)
TRAINS = (
    HEAD
    + """
def stop(*_):
    emit("checkpoint", f"Saved checkpoint at step {n}", step=n, path="checkpoints/x", seconds=0.01)
    emit("end", f"Run stopped at step {n}", status="stopped", step=n)
    os._exit(143)
signal.signal(signal.SIGTERM, stop)
load()
for n in range(1, 100000):
    step(n, 100000)
    time.sleep(0.05)
"""
)
LOADS = (
    HEAD
    + """
emit("start", "dflash trainer: torch 0, python 3", run_id="x")
emit("dataset", "Loaded dataset: 8 samples", samples=8, seconds=0.1)
time.sleep(600)
"""
)
WAITS = """
open(run + "/waits", "w").close()
while not os.path.exists(run + "/go"): time.sleep(0.02)
"""
"""Until the test says `Runner.go`; it may look at it in this state after `Runner.waits`."""

TRAINS_LATER = LOADS.replace("time.sleep(600)", WAITS + "load()\nstep(1, 10)\ntime.sleep(600)")
CRASHES = (
    HEAD
    + """
load()
step(1, 10)
def inner(): raise KeyError("image_grid_thw")
inner()
"""
)
FINISHES_LATER = FINISHES.replace("load()\n", "load()\n" + WAITS)
CRASHES_LATER = CRASHES.replace("load()\nstep(1, 10)", WAITS)
KILLED = HEAD + "load()\nstep(1, 10)\nos.kill(os.getpid(), signal.SIGKILL)\n"
HOSTILE = (
    HEAD
    + r"""
load()
os.write(1, b"\x1b]0;owned\x07\x1b[31mred\x1b[0m and \x9b2J\n 10%|#  |\r100%|###|\nnot utf-8: \xff\xfe\nlast line\n")
time.sleep(600)
"""
)
