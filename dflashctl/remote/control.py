"""Starts a run under its supervisor and stops it, verified.

Standard library only, Python >= 3.9.
"""

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time

from dflashctl.remote import probe, store, supervisor

TAKEOVER = 15.0
"""Seconds within which a supervisor must have taken the run over."""

GONE_WAIT = 5.0
"""Seconds that killed processes may take to vanish."""

FOREIGN = ("SSH_", "DBUS_", "XDG_SESSION", "SUDO_")
"""Beginnings of variables that belong to the login and not to the run."""


def login():
    """(name, home) of the user we run as; in a container that may be a number with neither."""
    try:
        entry = pwd.getpwuid(os.geteuid())
    except KeyError:
        return str(os.geteuid()), os.environ.get("HOME", "/")
    return entry.pw_name, entry.pw_dir


def has_systemd():
    """Whether a transient unit can be made: PID 1 is systemd and we may talk to it."""
    return (
        os.path.isdir("/run/systemd/system") and os.geteuid() == 0 and shutil.which("systemd-run") is not None
    )


def unit_name(run_id):
    return f"dflash-{run_id}"


def unit_argv(run_id, run_dir, python, grace):
    """The command that starts the supervisor as a transient unit.

    KillMode=mixed: TERM goes to the supervisor alone, which passes it on, KILL to all. OOMPolicy=continue: it outlives the
    kill of the trainer, to record it.
    """
    properties = {
        "KillMode": "mixed",
        "TimeoutStopSec": f"{grace + supervisor.STRAY_WAIT + 10:g}",
        "LimitNOFILE": "1048576",
        "LimitMEMLOCK": "infinity",
        "OOMPolicy": "continue",
        "MemoryAccounting": "yes",
    }
    options = [f"--property={name}={value}" for name, value in properties.items()]
    head = ["systemd-run", "--quiet", f"--unit={unit_name(run_id)}", f"--description=dflash run {run_id}"]
    # systemd expands variables
    program = [word.replace("$", "$$") for word in supervisor_argv(run_dir, python)]
    return [*head, *options, *program]


def supervisor_argv(run_dir, python):
    return [python, "-I", "-u", os.path.join(run_dir, "supervisor.py"), run_dir]


def trainer_environment(base, extra, argv):
    """The trainer's whole environment: ours without the login's variables, the interpreter's folder in PATH, then `extra`."""
    environment = {name: value for name, value in base.items() if not name.startswith(FOREIGN)}
    folder = os.path.dirname(argv[0])
    if folder.startswith("/") and folder not in environment.get("PATH", "").split(":"):
        environment["PATH"] = folder + ":" + environment.get("PATH", "")
    environment["PYTHONUNBUFFERED"] = "1"
    environment.update(extra)
    return environment


def start(workspace, run_id, manifest, config_toml, argv, environment, grace, claim=()):
    """Write the run's folder, start the supervisor, and answer once the trainer runs or could not be started.

    Asked again with the `launch_id` of the manifest, it starts nothing and answers for the run that it started.
    `claim`: devices that no other living run of this workspace may use; of two launches at once, one is refused.
    Returns {"run_id", "path", "state", "note"}; note says why there is no systemd unit although systemd is there.
    """
    workspace = os.path.abspath(os.path.expanduser(workspace))
    run_dir = os.path.join(store.runs_dir(workspace), run_id)
    environment = trainer_environment(os.environ, environment, argv)
    user, _ = login()
    manifest = {**manifest, "run_id": run_id, "argv": argv, "user": user, "created": time.time()}
    unit = unit_name(run_id) if has_systemd() else None
    spec = {"argv": argv, "cwd": workspace, "environment": environment, "grace": grace}
    files = {
        "config.toml": config_toml,
        "run.log": "",
        "supervisor.py": supervisor_source(),
        "start.json": json.dumps(spec),
        "state.json": json.dumps(supervisor.new_state(run_id, unit), indent=1),
        "manifest.json": json.dumps(manifest, indent=1),
    }
    with store.locked(workspace):
        again = started_by(run_dir) == manifest.get("launch_id", "")  # the first answer was lost on its way
        for run in active_runs(workspace) if claim and not again else ():
            if shared := sorted(set(claim).intersection(run["devices"])):
                hint = "wait for it, choose other devices, or launch with --force"
                raise store.Refusal("busy", f"run {run['run_id']} uses {', '.join(shared)}", hint)
        if not again:
            store.create_run(workspace, run_id, files)
    note = start_unit(run_id, run_dir, grace) if unit and not again else ""
    if (note or not unit) and not again:
        start_session(run_dir)
    return {"run_id": run_id, "path": run_dir, "state": await_takeover(run_dir), "note": note}


def started_by(run_dir):
    """The launch that made this run; None where there is no such run or it does not say."""
    return (supervisor.read_json(os.path.join(run_dir, "manifest.json")) or {}).get("launch_id")


def active_runs(workspace):
    """[{run_id, devices}] of the runs of this workspace that live."""
    found = []
    for run_id in store.run_ids(workspace)[:50]:
        folder = os.path.join(store.runs_dir(workspace), run_id)
        state = probe.read_state(folder)
        if state and probe.standing(state) in ("starting", "running"):
            found.append({"run_id": run_id, "devices": devices_of(folder), "pid": state["pid"]})
    return found


def devices_of(run_dir):
    """Names of the devices that a run's manifest claims; none where it can't be read."""
    devices = (supervisor.read_json(os.path.join(run_dir, "manifest.json")) or {}).get("devices")
    lists = devices.values() if isinstance(devices, dict) else ()
    return sorted(
        {name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)}
    )


def supervisor_source():
    """The text of supervisor.py: handed over by the agent, or read from its file where we run from one."""
    source = getattr(supervisor, "SOURCE", None)
    if source is None:
        with open(supervisor.__file__, encoding="utf-8") as file:
            source = file.read()
    return source


def start_unit(run_id, run_dir, grace):
    """Empty when the unit was started; else why not, with the record changed to say that there is none."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        systemd(["systemctl", "reset-failed", unit_name(run_id)], 10)
    try:
        done = systemd(unit_argv(run_id, run_dir, sys.executable, grace), 20)
    except subprocess.TimeoutExpired:
        return ""  # systemd is slow, not unwilling: the unit may still come, so no other is started
    if done.returncode == 0:
        return ""
    why = done.stderr.decode("utf-8", "replace").strip() or f"exit code {done.returncode}"
    state = probe.read_state(run_dir)
    state["unit"] = None
    supervisor.write_json(os.path.join(run_dir, "state.json"), state)
    return f"no systemd unit, the run is in a session of its own: {why}"


def systemd(argv, timeout):
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)


def start_session(run_dir):
    with open(os.path.join(run_dir, "supervisor.log"), "ab") as log:
        subprocess.Popen(
            supervisor_argv(run_dir, sys.executable),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )


def await_takeover(run_dir):
    """The state once the supervisor has started the trainer, or failed to."""
    deadline = time.monotonic() + TAKEOVER
    while True:
        state = probe.read_state(run_dir)
        if state and state["status"] != "starting":
            return state
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    said = ""
    try:
        with open(os.path.join(run_dir, "supervisor.log"), encoding="utf-8", errors="replace") as file:
            said = file.read()[-2000:].strip()
    except OSError:
        pass
    error = f"the supervisor did not take the run over within {TAKEOVER:g} s" + (
        f": {said.splitlines()[-1]}" if said else ""
    )
    with contextlib.suppress(OSError):
        # it holds secrets, and a supervisor that is late must not start
        os.unlink(os.path.join(run_dir, "start.json"))
    state = state or supervisor.new_state(os.path.basename(run_dir), None)
    state.update(status="exited", ended=time.time(), error=error)
    supervisor.write_json(os.path.join(run_dir, "state.json"), state)
    return state


def stop(run_dir, grace, pause, client=None):
    """Stop a run: TERM, `grace` seconds, KILL. Idempotent; returns {"state", "was_running", "killed", "lost"}.

    `pause(seconds)` sleeps. `client`: who asks, for the record. Raises Refusal when something of the run outlives SIGKILL.
    """
    state = probe.read_state(run_dir)
    if state is None:
        raise store.Refusal("broken_run", f"{run_dir}/state.json is missing or unreadable")
    standing = probe.standing(state)
    if standing in ("exited", "lost"):
        return {"state": state, "was_running": False, "killed": False, "lost": standing == "lost"}
    if standing == "starting":
        state = await_takeover(run_dir)  # a supervisor that has read its record would not see this stop
    request = {"requested": time.time(), "grace": grace, "client": client}
    leave_request(run_dir, request)
    deadline = time.monotonic() + grace + supervisor.STRAY_WAIT
    _, guarded = probe.living(state)
    if guarded:
        supervisor.send([state["supervisor_pid"]], signal.SIGTERM)
        while time.monotonic() < deadline and probe.living(state)[1]:
            pause(0.02)
        state = probe.read_state(run_dir) or state
    if state["status"] != "exited":
        state = end_unsupervised(run_dir, state, request, pause)
    verify_gone(state, pause)
    return {"state": state, "was_running": True, "killed": bool(state["killed_after_grace"]), "lost": False}


def leave_request(run_dir, request):
    """Say in stop.json that this stop was asked for. A full disk keeps no run from being stopped: then it takes the reserve,
    and without that the stop is carried out all the same, and recorded as one from outside.
    """
    for last in (False, True):
        try:
            return supervisor.write_json(os.path.join(run_dir, "stop.json"), request)
        except OSError:
            if not last:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(run_dir, ".reserve"))


def end_unsupervised(run_dir, state, request, pause):
    """Stop a run whose supervisor is gone or does not answer, and record that in its place."""
    group = state["pgid"]
    if group and supervisor.alive(state["pid"], state["pid_start_ticks"]):
        deadline = time.monotonic() + request["grace"]
        signal_group(group, signal.SIGTERM)
        while time.monotonic() < deadline and supervisor.members(group):
            pause(0.05)
        if supervisor.members(group):
            state["killed_after_grace"] = True
            signal_group(group, signal.SIGKILL)
    if supervisor.alive(state["supervisor_pid"], state["supervisor_start_ticks"]):
        supervisor.send([state["supervisor_pid"]], signal.SIGKILL)
    now = time.time()
    state.update(
        status="exited",
        ended=now,
        updated=now,
        stop_requested=request["requested"],
        stopped_by=supervisor.ASKED,
        stop_client=request["client"],
    )
    state["error"] = "its supervisor was gone when it was stopped, so its exit code is not known"
    supervisor.write_json(os.path.join(run_dir, "state.json"), state)
    return state


def signal_group(group, number):
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or told by verify_gone
        os.killpg(group, number)


def verify_gone(state, pause):
    """Raises Refusal when processes of the run are still there GONE_WAIT seconds after a KILL."""
    if not state["pgid"]:
        return
    deadline = time.monotonic() + GONE_WAIT
    while left := supervisor.members(state["pgid"]):
        supervisor.send(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise store.Refusal(
                "not_stopped",
                f"processes of the run survived SIGKILL: {', '.join(map(str, sorted(left)))}",
                "they hang in the kernel (a GPU or a disk that does not answer); a reboot of the host ends them",
            )
        pause(0.05)
