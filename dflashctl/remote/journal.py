"""The growing files of a run: run.log, events.jsonl, log.index. Only their ends are read, whatever their size.

Standard library only, Python >= 3.9.
"""

import base64
import collections
import json
import os

from dflashctl.remote import supervisor

BLOCK = 64 * 1024
TAIL_BUDGET = 16 * 1024 * 1024
"""Bytes looked through, from the end, to find the last lines."""

LINE_LIMIT = 4096
"""Bytes kept of a line; the rest is left out, and said so."""

EVENTS_HEAD = 1024 * 1024
EVENTS_TAIL = 512 * 1024
EVENT_LIMIT = 64 * 1024
"""Bytes of one event; a longer line is none of the trainer's, and would make every answer as long."""

STEPS_KEPT = 50
REPEATED = ("target_loading", "target_ready", "drafter_ready", "evaluating", "evaluation", "failed")
"""Events of which all are kept (the last 64); of the others the last one."""

NEWS_LIMIT = 1024 * 1024
"""Bytes of log in one answer to a question for what is new."""

NUMBERED = 64 * 1024 * 1024
"""Logs up to this size have their lines numbered."""


def tail_offset(fd, size, lines):
    """Offset at which the last `lines` lines of the file begin, looking at TAIL_BUDGET bytes at most."""
    if lines <= 0:
        return size
    position, wanted, first = size, lines, True
    while position > 0 and size - position < TAIL_BUDGET:
        step = min(BLOCK, position)
        position -= step
        block = os.pread(fd, step, position)
        at = len(block)
        while True:
            at = block.rfind(b"\n", 0, at)
            if at < 0:
                break
            if first and position + at == size - 1:
                first = False  # the newline that ends the last line begins no further one
                continue
            first = False
            wanted -= 1
            if wanted == 0:
                return position + at + 1
        first = False
    return position


def line_start(fd, offset):
    """The beginning of the line that holds `offset`, or `offset` where that is more than a tail's budget away."""
    position = offset
    while position > 0 and offset - position < TAIL_BUDGET:
        step = min(BLOCK, position)
        at = os.pread(fd, step, position - step).rfind(b"\n")
        if at >= 0:
            return position - step + at + 1
        position -= step
    return 0 if position == 0 else offset


def since_offset(index_path, fd, size, epoch):
    """Where the log stood at `epoch`: the offset of the last heartbeat before it, at a line's beginning."""
    found = 0
    try:
        with open(supervisor.open_regular(index_path), errors="replace") as file:
            for line in file:
                time_text, _, offset_text = line.partition(" ")
                try:
                    if float(time_text) > epoch:
                        break
                    found = max(0, int(offset_text))
                except ValueError:
                    continue
    except OSError:
        return 0
    return line_start(fd, min(found, size))


def shown(line):
    """A line as a terminal would leave it: the last state of a progress bar, at most LINE_LIMIT bytes, as text."""
    states = [part for part in line.split(b"\r") if part]
    line = states[-1] if states else b""
    cut = f" ... ({len(line) - LINE_LIMIT} bytes left out)" if len(line) > LINE_LIMIT else ""
    return line[:LINE_LIMIT].decode("utf-8", "replace") + cut


def of_log(path, read):
    """The `log` part of a snapshot: `read(fd, stat)` of the log, or why there is none."""
    try:
        fd = supervisor.open_regular(path)
    except FileNotFoundError:
        return {"path": path, "unread": "there is no log yet"}
    except OSError as error:
        return {"path": path, "unread": str(error.strerror)}
    try:
        info = os.fstat(fd)
        part = {"path": path, "size": info.st_size, "inode": info.st_ino, "mtime": info.st_mtime}
        return {**part, **read(fd, info)}
    except OSError as error:
        return {"path": path, "unread": str(error.strerror)}
    finally:
        os.close(fd)


def log_tail(path, lines, counter=None):
    """The `log` part of a snapshot: the last `lines` lines.

    `counter`: a LineCounter, kept from call to call, that numbers the lines.
    """

    def read(fd, info):
        start = tail_offset(fd, info.st_size, lines)
        data = os.pread(fd, min(info.st_size - start, TAIL_BUDGET), start)
        complete = data[: data.rfind(b"\n") + 1]
        texts = [shown(part) for part in data.split(b"\n")]
        if texts and not texts[-1]:
            texts.pop()
        part = {"offset": start + len(complete), "lines": texts[-lines:] if lines > 0 else []}
        if info.st_size <= NUMBERED:
            before = (counter or LineCounter()).before(fd, info.st_ino, start)
            part["first_line"] = before + 1 + max(0, len(texts) - lines)
        return part

    return of_log(path, read)


def log_news(path, lines, since, counter):
    """The `log` part of a snapshot that is one of many: only what was written since the last, as base64 in `data`.

    since: {inode, offset} of the first byte not had yet. Without it, in another file, or further behind than anybody
    wants to catch up, it begins anew with the last `lines` lines. `at`: where `data` begins; `first_line`: that
    line's number, where it begins anew. At most NEWS_LIMIT bytes: there is more where at + len(data) < size.
    """

    def read(fd, info):
        at, part = since.get("offset", -1), {}
        if info.st_ino != since.get("inode") or not 0 <= info.st_size - at <= TAIL_BUDGET:
            at = max(tail_offset(fd, info.st_size, lines), info.st_size - NEWS_LIMIT)
            if info.st_size <= NUMBERED:
                part["first_line"] = counter.before(fd, info.st_ino, at) + 1
        data = os.pread(fd, min(info.st_size - at, NEWS_LIMIT), at)
        return {**part, "at": at, "data": base64.b64encode(data).decode()}

    return of_log(path, read)


class LineCounter:
    """Newlines before an offset, counted on from the last one asked for."""

    def __init__(self):
        self.inode = None
        self.offset = self.count = 0

    def before(self, fd, inode, offset):
        """How many stand before `offset`; read from where the last question ended, unless that was further on."""
        if inode != self.inode or offset < self.offset:
            self.inode, self.offset, self.count = inode, 0, 0
        while self.offset < offset:
            block = os.pread(fd, min(BLOCK * 16, offset - self.offset), self.offset)
            if not block:
                break
            self.count += block.count(b"\n")
            self.offset += len(block)
        return self.count


def parse_event(line):
    """The event that a line holds; None where it holds none."""
    if len(line) > EVENT_LIMIT:
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


class EventsReader:
    """What events.jsonl says, read once from its head and its end and then only what is new."""

    def __init__(self, path):
        self.path = path
        self.reset()

    def reset(self):
        self.inode = None
        self.offset = 0
        self.last = None
        self.steps: collections.deque = collections.deque(maxlen=STEPS_KEPT)
        self.phases = {}
        self.bad_lines = 0

    def read(self):
        """The `events` part of a snapshot."""
        try:
            fd = supervisor.open_regular(self.path)
        except FileNotFoundError:
            return {"last": None, "steps": [], "phases": {}}
        except OSError as error:
            return {"unread": str(error.strerror)}
        try:
            info = os.fstat(fd)
            if info.st_ino != self.inode or info.st_size < self.offset:
                self.reset()
                self.inode = info.st_ino
            self.catch_up(fd, info.st_size)
        except OSError as error:
            return {"unread": str(error.strerror)}
        finally:
            os.close(fd)
        part = {"last": self.last, "steps": list(self.steps), "phases": self.phases}
        if self.bad_lines:
            part["bad_lines"] = self.bad_lines
        return part

    def catch_up(self, fd, size):
        if size - self.offset > EVENTS_HEAD + EVENTS_TAIL:
            if self.offset == 0:
                self.take(os.pread(fd, EVENTS_HEAD, 0))
            self.offset = line_start(fd, size - EVENTS_TAIL)
        data = os.pread(fd, size - self.offset, self.offset)
        end = data.rfind(b"\n") + 1  # the last line may still be half written
        self.take(data[:end])
        self.offset += end

    def take(self, data):
        """Whole lines, of which the last one ends with a newline."""
        for line in data.split(b"\n")[:-1]:
            event = parse_event(line)
            if event is None:
                self.bad_lines += bool(line.strip())
                continue
            name = event["event"]
            self.last = event
            if name == "step":
                self.steps.append(event)
            elif name in REPEATED:
                self.phases[name] = [*self.phases.get(name, []), event][-64:]
            else:
                self.phases[name] = event
