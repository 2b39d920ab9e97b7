"""What the documents say of the code: links, names, options, codes and formats that can be checked."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import typer

from dflashctl import runs
from dflashctl.cli.app import HELP, app
from dflashctl.config import WARMUP
from dflashctl.diagnose.model import Diagnosis
from dflashctl.errors import ExitCode
from dflashctl.phases import PHASE_WORDS
from dflashctl.remote import agent, journal, supervisor
from dflashctl.render import jsonout
from dflashctl.snapshot import State, Step
from dflashctl.stop import Stopped
from dflashctl.verdict import EXIT_CODES
from trainer.config import Config
from trainer.events import Events

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
CLI = (ROOT / "docs/cli.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()

SHARED = {"--host", "--hosts", "--accept-new", "--help"}
"""Options that docs/cli.md names once for all commands."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not heading or heading in anchors(there), f"{target}#{heading}"


def anchors(page):
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_exist(page):
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert f"def {name}(" in tests, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    folders = [ROOT, ROOT / "dflashctl", ROOT / "trainer", page.parent]
    for name in re.findall(r"`((?:[\w-]+/)+[a-z]\w*\.(?:py|sh|toml|txt|examples))\b", page.read_text()):
        assert any((folder / name).exists() for folder in folders), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_are_named_exist(page):
    known = {field.name: field.default_factory for field in dataclasses.fields(Config)}
    del known["warmup"]  # its keys are phases
    for section, key in re.findall(rf"`({'|'.join(known)})\.(\w+)(?: = [^`]*)?`", page.read_text()):
        is_file = key in ("py", "json", "toml", "safetensors")
        assert is_file or key in vars(known[section]()), f"{section}.{key}"


def test_the_usage_lines_name_every_command_and_option():
    commands = typer.main.get_command(app).commands
    lines = re.findall(r"^    dflashctl (\w+)(.*)$", CLI, re.MULTILINE)
    assert [name for name, _ in lines] == list(commands)
    for name, words in lines:
        said = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", words))
        options = [p for p in commands[name].params if p.param_type_name == "option"]
        ours = [set(p.opts) for p in options if SHARED.isdisjoint(p.opts)]
        assert said <= set().union(*ours), name
        assert [names for names in ours if said.isdisjoint(names)] == [], name


def test_the_exit_codes_are_all_there():
    table = CLI[CLI.index("## Exit codes") : CLI.index("`status`, `launch --wait`")]
    codes = sorted(int(code) for code in re.findall(r"\| (\d+) \|", table))
    assert codes == sorted(map(int, ExitCode))
    assert sorted(int(code) for code in re.findall(r"\b(\d+) \w", HELP)) == codes


def test_the_tree_names_every_module_at_the_top_and_everything_over_there():
    tree = ARCHITECTURE[ARCHITECTURE.index("    dflashctl/ ") : ARCHITECTURE.index("Data flows one way")]
    folders = [ROOT / "dflashctl", ROOT / "trainer", ROOT / "dflashctl/remote", ROOT / "dflashctl/transport"]
    modules = {file.name for folder in folders for file in folder.glob("[!_]*.py")} - {"lazyinvoke.py"}
    assert modules == {name for name in re.findall(r"\w+\.py", tree) if name in modules}
    named = set(re.findall(r"\b(\w+\.py)", tree))
    existing = {
        file.name for package in ("dflashctl", "trainer", "tests") for file in (ROOT / package).rglob("*.py")
    }
    assert named <= existing


def test_the_manifest_is_whole():
    part = ARCHITECTURE[ARCHITECTURE.index("manifest.json   ") : ARCHITECTURE.index("config.toml  run.log")]
    made = set(re.findall(r'^ +"(\w+)":', inspect.getsource(runs.manifest), re.MULTILINE))
    assert made | {"run_id", "created", "user", "argv"} <= set(re.findall(r"\w+", part))


def test_the_facts_and_the_fields_of_a_diagnosis_are_all_there():
    page = (ROOT / "docs/diagnosis.md").read_text()
    facts = page[page.index("## Facts") : page.index("## How it decides")]
    engine = "".join(file.read_text() for file in (ROOT / "dflashctl/diagnose").glob("*.py"))
    read = re.findall(r'facts\.get\("(\w+)"', engine)
    assert read
    assert {f"`{name}`" for name in read} <= set(re.findall("`[^`]*`", facts))
    fields = page[page.index("## The object") : page.index("## Facts")]
    for name in Diagnosis("healthy").to_json():
        assert f"`{name}`" in fields, name


def test_the_agents_methods_are_all_there():
    table = ARCHITECTURE[ARCHITECTURE.index("| method | params") : ARCHITECTURE.index("standing: `starting")]
    listed = set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) - {"method"}
    assert listed == {name[3:] for name in vars(agent.Agent) if name.startswith("do_")}


def test_the_record_of_a_run_is_whole():
    part = ARCHITECTURE[ARCHITECTURE.index("state.json (supervisor") : ARCHITECTURE.index("`boot` differs")]
    assert set(re.findall(r'"(\w+)"(?:: |,|})', part)) >= set(supervisor.new_state("a", None))
    assert {field.name for field in dataclasses.fields(State)} <= supervisor.new_state("a", None).keys()


EVENTS = {name for name in vars(Events) if not name.startswith("_")} - {"emit", "close"}


def test_the_events_are_all_there():
    part = re.search(r"^`(start, .*)`\.$", ARCHITECTURE, re.MULTILINE)[1]
    assert sorted(part.split(", ")) == sorted(EVENTS)
    kept = re.search(r"its last event, or a list of all: ([^}]*)}", ARCHITECTURE)[1]
    assert sorted(re.findall(r"\w+", kept)) == sorted(journal.REPEATED)


def test_the_events_and_figures_that_are_read_are_told():
    """The agent and `status` know them by name alone."""
    trees = [ast.parse(file.read_text()) for file in (ROOT / "dflashctl").rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    asking = [c for c in calls if re.search(r"(\.newest|\.time|phases\.get|^indexes)$", ast.unparse(c.func))]
    read = {arg.value for call in asking for arg in call.args if isinstance(arg, ast.Constant)}
    assert {"evaluating", "drafter_ready", "checkpoint"} <= read <= EVENTS
    assert set(journal.REPEATED) <= EVENTS
    assert {field.name for field in dataclasses.fields(Step)} - {"t"} <= inspect.signature(
        Events.step
    ).parameters.keys()


def test_the_states_and_phases_are_all_there():
    said = {word: re.search(rf"{word}:\s+`([^`]*)`", ARCHITECTURE)[1] for word in ("States", "Phases")}
    assert sorted(said["States"].split(", ")) == sorted(EXIT_CODES)
    assert said["Phases"].split(", ") == list(PHASE_WORDS)
    table = CLI[CLI.index("| state | when | code |") : CLI.index("**Windows.**")]
    codes = re.findall(r"^\| (\w+) \|.*\| (\d) \|$", table, re.MULTILINE)
    assert {state for state, _ in codes} == set(EXIT_CODES)
    assert {(state, str(int(code))) for state, code in EXIT_CODES.items()} <= set(codes)


def test_the_windows_of_silence_are_as_said():
    wanted = [f"{seconds:g}" for seconds in WARMUP.values()]
    example = (ROOT / "hosts.example.toml").read_text()
    assert re.findall(r"\d+", re.search(r"the defaults are (.*)\.", example)[1]) == wanted
    assert re.findall(r"\d+", re.search(r"else start (.*?)\.", CLI, re.DOTALL)[1]) == wanted
    assert re.search(r"warmup = \{ (.*) \}", ARCHITECTURE)[1] == ", ".join(
        f"{phase} = {seconds:g}" for phase, seconds in WARMUP.items()
    )


@pytest.mark.parametrize("command", ["status", "ls", "launch", "stop"])
def test_the_fields_of_json_are_all_there(command):
    said = re.search(rf"^\| {command} \| (`([^`]*)`.*) \|$", CLI, re.MULTILINE)
    made = jsonout.runs if command == "ls" else getattr(jsonout, command)
    fields = set(re.findall(r'"(\w+)":', inspect.getsource(made)))
    if command == "stop":
        fields |= {field.name for field in dataclasses.fields(Stopped)}
    assert set(said[2].split()) <= fields <= set(re.findall(r"\w+", said[1]))


BELOW = {
    "dflashctl": (
        "cli",
        "render",
        "watch",
        "status",
        "vitals",
        "verdict",
        "diagnose",
        "remote",
        "transport",
        "config",
        "errors",
    ),
    "trainer": (
        "train",
        "inputs",
        "probe",
        "selection",
        "room",
        "pipeline",
        "memory",
        "runtime",
        "modeling",
        "kernels",
        "config",
    ),
}
"""Parts of which none imports one that stands before it, as the architecture has the flow."""


@pytest.mark.parametrize("package", BELOW)
def test_nothing_imports_upwards(package):
    order = BELOW[package]
    for rank, name in enumerate(order):
        above = {f"{package}.{other}" for other in order[:rank]}
        for file in [ROOT / package / f"{name}.py", *(ROOT / package / name).rglob("*.py")]:
            if file.exists():
                assert not above & imports(file), file


def imports(file):
    """Modules of two names that a file imports anywhere but for types."""
    tree = ast.parse(file.read_text())
    typing_only = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    left_out = {id(n) for block in typing_only for n in ast.walk(block)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in left_out:
            found |= {".".join(f"{node.module}.{name.name}".split(".")[:2]) for name in node.names}
    return found
