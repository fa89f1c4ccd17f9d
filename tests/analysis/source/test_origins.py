"""A value is edited where it stands: an option's default, a field, a constant, a key of a file, a line of a shell."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.source.patches import Wanted, calls_of, edit_of, patch, patch_of, wanted_of
from dlprof.analysis.source.where import placed
from dlprof.result import Change, Outcome, change
from tests.analysis.source.test_where import source
from tests.fixtures.edits import apply
from tests.fixtures.jobs import COMPILES_NOTHING, record
from tests.fixtures.jobs import facts as recorded_facts

LOADER = "from torch.utils.data import DataLoader\n"
PARSER = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--workers', type=int, default=0)\n"
PARSED = LOADER + PARSER + "args = p.parse_args()\n"
CALL = "x = DataLoader(data, num_workers={})\n"
OPTION = {"name": "--workers", "dest": "workers", "switch": False, "on": False}
MAKE = "def make(data, workers):\n    return DataLoader(data, num_workers=workers)\n"
FIELDS = "from dataclasses import dataclass, field\n@dataclass\nclass Data:\n    path: str = ''\n    workers: int = 0\n"
NESTED = "@dataclass\nclass Config:\n    data: Data = field(default_factory=Data)\n"
READ = "import yaml\nwith open('c.yaml') as f:\n    cfg = yaml.safe_load(f)\n"


def written(folder: Path, files: dict[str, str], line: str = "", **facts: Any) -> dict[str, Any]:
    """Write the files of a job, and return its facts as a recording has them, with the call in the first file."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    first = next(iter(files))
    calls = (n for n in ast.walk(ast.parse(files[first])) if isinstance(n, ast.Call))
    call = next(n for n in calls if ast.unparse(n.func) in ("DataLoader", "Trainer(model, args).train"))
    span = {
        "line": call.lineno,
        "end_line": call.end_lineno,
        "column": call.col_offset,
        "end_column": call.end_col_offset,
    }
    row = {"kind": "loader", "file": first, **span, "digest": digests[first], "roles": ["train"]}
    row |= TRAINER if "Trainer(" in files[first] else {}
    return {
        "directory": str(folder),
        "argv": [first, *line.split()],
        "calls": [row | {"values": facts.pop("values", {"num_workers": 0})}],
        "files": [{"file": name, "digest": digest} for name, digest in digests.items()],
        **facts,
    }


def applied(folder: Path, text: str) -> dict[str, str]:
    """Have git apply a patch, and return the lines that it adds, by file."""
    apply(folder, text)
    added: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("+++ "):
            name = line[6:].rstrip("\t")
        elif line.startswith("+"):
            added[name] = added.get(name, "") + line[1:] + "\n"
    return added


ARGS = PARSED + CALL.format("args.workers")
DEFAULT = "p.add_argument('--workers', type=int, default=8)\n"
Job = tuple[dict[str, str], Any, list[dict[str, Any]], str]


def job(files: Any, then: Any, options: list[dict[str, Any]] | None = None, line: str = "") -> Job:
    """Return the files of a job, what becomes of them, its options (none given: by argparse) and its command line.

    A text alone is of t.py.
    """
    files = {"t.py": files} if isinstance(files, str) else files
    parsed = any("argparse" in text and "'--workers'" in text for text in files.values())
    return files, then, ([OPTION] if parsed else []) if options is None else options, line


# Each with the lines that are other in the end.
EDITED: dict[str, Job] = {
    "option": job(ARGS, DEFAULT),
    "option that was read before torch was imported": job(ARGS, DEFAULT, line="--lr 1 -- 2", options=[]),
    "option, through a parameter": job(
        PARSED + MAKE + "make(1, args.workers)\nmake(2, workers=args.workers)\n", DEFAULT, line="--lr 0.1"
    ),
    "option of another file, through an attribute": job(
        {
            "t.py": f"{LOADER}class T:\n    def __init__(self, args):\n        self.args = args\n"
            "    def run(self):\n        DataLoader(data, num_workers=self.args.workers)\n",
            "opts.py": PARSER.replace("p.add", "    p.add").replace("p =", "def parse():\n    p =")
            + "    return p.parse_args()\n",
        },
        {"opts.py": "    p.add_argument('--workers', type=int, default=8)\n"},
    ),
    "option of another name, in a dict of keywords": job(
        PARSED.replace("'--workers'", "'-j', '--jobs', dest='n'")
        + "kw = {'num_workers': args.n, 'pin_memory': True}\nDataLoader(data, **kw)\n",
        "p.add_argument('-j', '--jobs', dest='n', type=int, default=8)\n",
        options=[OPTION | {"name": "--jobs", "dest": "n"}],
    ),
    "click": job(
        f"import click\n{LOADER}@click.command()\n@click.option('--workers', default=0)\n"
        "def main(workers):\n    DataLoader(data, num_workers=workers)\nmain()\n",
        "@click.option('--workers', default=8)\n",
        line="--lr 1",
    ),
    "typer": job(
        f"import typer\napp = typer.Typer()\n{LOADER}@app.command()\n"
        "def main(workers: int = typer.Option(0)):\n    DataLoader(data, num_workers=workers)\napp()\n",
        "def main(workers: int = typer.Option(8)):\n",
    ),
    "dataclass": job(LOADER + FIELDS + "cfg = Data('x')\n" + CALL.format("cfg.workers"), "    workers: int = 8\n"),
    "dataclass in a dataclass, imported": job(
        {
            "t.py": f"{LOADER}from conf import Config\ncfg = Config()\n{CALL.format('cfg.data.workers')}",
            "conf.py": FIELDS + NESTED,
        },
        {"conf.py": "    workers: int = 8\n"},
    ),
    "field of a dataclass that its maker sets": job(
        LOADER + FIELDS.replace("= 0", "= 2") + "cfg = Data('x', 0)\n" + CALL.format("cfg.workers"),
        "cfg = Data('x', 8)\n",
    ),
    "constant": job(f"{LOADER}N = 0  # few\n{CALL.format('N')}", "N = 8  # few\n"),
    "constant of another module": job(
        {"pkg/t.py": f"{LOADER}from pkg import c\nfrom pkg.c import N\n{CALL.format('N')}", "pkg/c.py": "N: int = 0\n"},
        {"pkg/c.py": "N: int = 8\n"},
    ),
    "class": job(f"{LOADER}class Config:\n    workers = 0\n{CALL.format('Config.workers')}", "    workers = 8\n"),
    "default of a parameter": job(
        LOADER + MAKE.replace("workers):", "workers=0):") + "make(1)\nmake(2)\n", "def make(data, workers=8):\n"
    ),
    "dict": job(
        LOADER + "C = {'lr': 0, 'workers': 0}\n" + CALL.format("C['workers']"), "C = {'lr': 0, 'workers': 8}\n"
    ),
    "other values of the same name": job(
        PARSED + "class Test:\n    workers = 2\n" + CALL.format("args.workers"), DEFAULT
    ),
    "YAML": job(
        {
            "t.py": LOADER + READ + CALL.format("cfg['data']['workers']"),
            "c.yaml": "lr: 0\ndata:\n  workers:   0 # few\n",
        },
        {"c.yaml": "  workers:   8 # few\n"},
    ),
    "YAML with the same key in two parts": job(
        {
            "t.py": LOADER + READ + CALL.format("cfg.data.workers"),
            "c.yaml": "eval: {workers: 0}\ndata: {lr: 0, 'workers': 0, x: 1}\n",
        },
        {"c.yaml": "data: {lr: 0, 'workers': 8, x: 1}\n"},
    ),
    "YAML, into a dataclass": job(
        {
            "t.py": LOADER + READ + FIELDS.replace("= 0", "= 2") + "c = Data(**cfg)\n" + CALL.format("c.workers"),
            "c.yaml": "workers: 0\n",
        },
        {"c.yaml": "workers: 8\n"},
    ),
    "JSON": job(
        {
            "t.py": f"{LOADER}import json\ncfg = json.load(open('c.json'))\n"
            + CALL.format("cfg.get('dataloader_num_workers', 4)"),
            "c.json": '{"a": [0, {"b": 0}],\n\t"dataloader_num_workers" :0 }',
        },
        {"c.json": '\t"dataloader_num_workers" :8 }\n'},
    ),
    "TOML": job(
        {
            "t.py": f"{LOADER}import tomllib\ncfg = tomllib.load(f)\n" + CALL.format("cfg['workers']"),
            "c.toml": "# c\n[data]\nworkers = 0\n",
        },
        {"c.toml": "workers = 8\n"},
    ),
    "Hydra": job(
        {
            "t.py": f"import hydra\n{LOADER}@hydra.main(config_path='conf')\ndef main(cfg):\n"
            "    DataLoader(data, num_workers=cfg.data.workers)\nmain()\n",
            "conf/data/a.yaml": "# @package _group_\nworkers: 0\n",
            "conf/config.yaml": "defaults:\n  - data: a\nlr: 1\n",
        },
        {"conf/data/a.yaml": "workers: 8\n"},
        line="lr=2",
    ),
    "YAML, into an object that a library makes": job(
        {
            "t.py": f"{LOADER}class Data(LightningDataModule):\n    def __init__(self, workers: int = 2):\n"
            "        self.workers = workers\n    def train_dataloader(self):\n"
            "        return DataLoader(d, num_workers=self.workers)\nLightningCLI(Model, Data)\n",
            "c.yaml": "trainer:\n  max_steps: 0\ndata:\n  workers: 0\n",
        },
        {"c.yaml": "  workers: 8\n"},
        line="fit --config",
    ),
    "Makefile": job(
        {
            "t.py": PARSED + CALL.format("args.workers"),
            "Makefile": "train:\n\tpython t.py --lr 0.1 \\\n\t  --workers 0 --x\neval:\n\tpython e.py --workers 0\n",
        },
        {"Makefile": "\t  --workers 8 --x\n"},
        line="--lr 0.1 --workers 0 --x",
    ),
    "script of a scheduler": job(
        {
            "pkg/t.py": PARSED + CALL.format("args.workers"),
            "scripts/a.sbatch": "#!/bin/sh\n#SBATCH -n 1\n# t.py --workers=0\nsrun python -m pkg.t --workers=0\n",
        },
        {"scripts/a.sbatch": "srun python -m pkg.t --workers=8\n"},
        line="--workers=0",
    ),
    "Hydra's override in a script": job(
        {
            "t.py": f"{LOADER}{READ}{CALL.format('cfg.data.workers')}",
            "c.yaml": "data: {workers: 0}\n",
            "a.sh": "python t.py data.workers=0 lr=1\n",
        },
        {"a.sh": "python t.py data.workers=8 lr=1\n"},
        line="data.workers=0 lr=1",
    ),
}


@pytest.mark.parametrize("name", EDITED)
def test_a_value_is_edited_where_it_stands(tmp_path: Path, name: str) -> None:
    files, after, options, line = EDITED[name]
    facts = written(tmp_path, files, line, options=options)
    made = patch_of([facts], {"loader.num_workers": 8})
    assert made.left_out == ()
    assert applied(tmp_path, made.text) == ({"t.py": after} if isinstance(after, str) else after)


KEYS = LOADER + READ + CALL.format("cfg['data']['workers']")
YAML = {"c.yaml": "data: {workers: 0}\n"}
SET = "set --workers 8"

# Each with why there is no edit.
LEFT: dict[str, Job] = {
    "given by the user": job(ARGS, SET, line="--workers 0"),
    "a variable of a shell": job({"t.py": ARGS, "a.sh": "N=0\npython t.py --workers $N\n"}, SET, line="--workers 0"),
    "two lines of shells": job(
        {"t.py": ARGS, "a.sh": "python t.py --workers 0\n", "b.sh": "python t.py --workers 0\n"},
        SET,
        line="--workers 0",
    ),
    "a line with other options": job({"t.py": ARGS, "a.sh": "python t.py --workers 0\n"}, SET, line="--workers 0 --x"),
    "another script's line": job({"t.py": ARGS, "a.sh": "python start.py --workers 0\n"}, SET, line="--workers 0"),
    "a line in a comment": job({"t.py": ARGS, "a.sh": "# python t.py --workers 0\n"}, SET, line="--workers 0"),
    "an option of other words": job(
        ARGS.replace("parse_args()", "parse_args(words)"), "what the command line gives was not recorded", options=[]
    ),
    "options of a file": job(
        ARGS.replace("Parser()", "Parser(fromfile_prefix_chars='@')"), "what the command line gives was not recorded"
    ),
    "the begin of a name": job(ARGS, SET, line="--work 0"),
    "letters": job(ARGS.replace("'--workers'", "'-j', '--workers'"), SET, line="-vj0"),
    "a decorator that may give it": job(
        LOADER + "@gin.configurable\n" + MAKE.replace("workers):", "workers=0):") + "make(1)\n",
        "no default that is sure",
    ),
    "two options of one value": job(
        PARSED + "p.add_argument('--other', dest='workers', default=0)\n" + CALL.format("args.workers"),
        "in several places",
        options=[OPTION, OPTION | {"name": "--other"}],
    ),
    "set after parsing": job(
        PARSED + "args.workers = min(args.workers, 4)\n" + CALL.format("args.workers"), "workers is computed at t.py:6"
    ),
    "counted up": job(PARSED + "args.workers += 0\n" + ARGS[len(PARSED) :], "set again at t.py:6"),
    "set by name": job(
        PARSED + "setattr(args, 'workers', f())\n" + CALL.format("args.workers"), "workers is computed at t.py:6"
    ),
    "defaults that are set": job(
        PARSED.replace("args =", "p.set_defaults(workers=0)\nargs =") + CALL.format("args.workers"), SET
    ),
    "also in a file": job({"t.py": ARGS, "c.yaml": "workers: 0\n"}, SET),
    "a default that is computed": job(
        ARGS.replace("default=0", "default=os.cpu_count() // 64"), "workers is computed at t.py:4"
    ),
    "a default of another type": job(ARGS.replace("default=0", "default='0'"), SET),
    "computed": job(PARSED + CALL.format("args.workers // 2"), "num_workers is computed"),
    "a formatted key": job({"t.py": LOADER + READ + CALL.format("cfg[f'{x}_workers']"), **YAML}, "is computed"),
    "the environment": job(
        {"t.py": LOADER + "import os\n" + CALL.format("int(os.environ.get('workers', 0))"), **YAML}, "is computed"
    ),
    "a shadowed name": job(
        LOADER + "workers = 0\ndef make(workers):\n    return DataLoader(d, num_workers=workers)\nmake(f())\n",
        "workers is computed",
    ),
    "a loop": job(LOADER + "for n in (0, 2):\n    DataLoader(d, num_workers=n)\n", "n is computed"),
    "a function that is passed on": job(
        LOADER + MAKE + "make(1, 0)\nrun(make, 4)\n", "what make gets for workers was not found"
    ),
    "calls that differ": job(LOADER + MAKE + "make(1, 0)\nmake(2, 0)\n", "in several places"),
    "a method of that name": job(
        LOADER + FIELDS + "    @property\n    def workers(self):\n        return 0\n" + CALL.format("Data().workers"),
        "workers is set again",
    ),
    "text that is run": job(
        LOADER + "n = 0\nexec(open('configurator.py').read())\n" + CALL.format("n"), "n may be set by other code"
    ),
    "a global": job(
        LOADER + "n = 0\ndef f():\n    global n\n    n = 0\n" + CALL.format("n"), "n may be set by other code"
    ),
    "a constant that the command line gives": job(
        LOADER + FIELDS + "cfg = cli(Data)\n" + CALL.format("cfg.workers"),
        "the command line gives it",
        line="--data.workers 0",
    ),
    "a key of two files": job({"t.py": KEYS, **YAML, "d.json": '{"data": {"workers": 0}}'}, "in several places"),
    "a key of another value": job({"t.py": KEYS, "c.yaml": "data: {workers: 2}\n"}, "set data.workers: 8 in c.yaml"),
    "a text that looks like the value": job({"t.py": KEYS, "c.yaml": "data: {workers: '0'}\n"}, "set data.workers: 8"),
    "a key that is given": job({"t.py": KEYS, **YAML}, "set data.workers: 8 in c.yaml", line="data.workers=0"),
    "an alias": job({"t.py": KEYS, "c.yaml": "n: &n 0\ndata: {workers: *n}\n"}, "c.yaml: aliases are not followed"),
    "YAML that cannot be parsed": job({"t.py": KEYS, "c.yaml": "workers: [0\n"}, "c.yaml: it cannot be parsed"),
    "a number that is written otherwise": job(
        {"t.py": KEYS, "c.yaml": "data:\n  workers:\n    !!int\n    '0'\n"}, "set data.workers: 8 in c.yaml"
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_sure_is_not_edited(tmp_path: Path, name: str) -> None:
    files, why, options, line = LEFT[name]
    facts = written(tmp_path, files, line, options=options)
    made = patch_of([facts], {"loader.num_workers": 8})
    assert made.text == edit_of([facts], {"loader.num_workers": 8}) == ""
    ((_, _, said),) = made.left_out
    assert why in said


def test_what_was_written_since_is_not_edited(tmp_path: Path) -> None:
    files = {
        "t.py": LOADER + "from o import N\n" + KEYS.replace("cfg['data']['workers']", "N"),
        "o.py": "N = 0\n",
        **YAML,
    }
    facts = written(tmp_path, files)
    assert applied(tmp_path, patch_of([facts], {"loader.num_workers": 8}).text) == {"o.py": "N = 8\n"}
    ((_, _, said),) = patch_of([facts], {"loader.num_workers": 4}).left_out
    assert said == "num_workers is `N` there: o.py: the file has changed since it was recorded"
    without = {name: value for name, value in facts.items() if name != "files"}
    assert patch_of([without], {"loader.num_workers": 4}).left_out[0][2] == "num_workers is `N` there"


def test_settings_of_workers_hold_where_the_script_is_started_without(tmp_path: Path) -> None:
    facts = written(tmp_path, {"a b.py": ARGS}, options=[OPTION])
    overrides = {"loader.num_workers": 8, "loader.persistent_workers": True, "loader.prefetch_factor": 4}
    made = patch_of([facts], overrides)
    assert applied(tmp_path, made.text)["a b.py"] == (
        "p.add_argument('--workers', type=int, default=8)\nx = DataLoader(data, num_workers=args.workers, "
        "persistent_workers=args.workers > 0, prefetch_factor=4 if args.workers else None)\n"
    )
    assert edit_of([facts], overrides) == ""  # it has been applied
    assert made.elsewhere == (("a b.py", 4, "p.add_argument('--workers', type=int, default=0)"),)


@pytest.mark.parametrize(
    ("beside", "is_edited"),
    [
        ("prefetch_factor=p if args.workers else None", True),
        ("prefetch_factor=p if args.workers > 0 else None, persistent_workers=keep and args.workers > 0", True),
        ("multiprocessing_context='fork'", True),
        ("prefetch_factor=p if keep else None", False),
        ("prefetch_factor=p", False),
        ("persistent_workers=keep or args.workers > 0", False),
    ],
)
def test_a_loader_is_to_have_no_workers_where_all_that_they_need_is_then_off(
    tmp_path: Path, beside: str, is_edited: bool
) -> None:
    call = f"x = DataLoader(data, num_workers=args.workers, {beside})\n"
    text = PARSED.replace("default=0", "default=2") + call
    facts = written(tmp_path, {"t.py": text}, options=[OPTION], values={"num_workers": 2})
    made = patch_of([facts], {"loader.num_workers": 0})
    assert bool(made.text) == is_edited
    if is_edited:
        after = text.replace("default=2", "default=0").replace("'fork'", "None").splitlines()
        changed = [line for line in after if line not in text.splitlines()]
        assert applied(tmp_path, made.text)["t.py"].splitlines() == changed
    else:
        assert "cannot be set beside" in made.left_out[0][2]


@pytest.mark.parametrize(
    ("beside", "after"),
    [
        ("persistent_workers=args.workers > 0", "persistent_workers=args.workers > 0"),
        ("persistent_workers=True if args.workers else False", "persistent_workers=True if args.workers else False"),
        ("persistent_workers=False", "persistent_workers=args.workers > 0"),
    ],
)
def test_what_a_loader_has_once_it_has_workers_is_left_alone(tmp_path: Path, beside: str, after: str) -> None:
    text = PARSED + f"x = DataLoader(data, num_workers=args.workers, {beside})\n"
    facts = written(tmp_path, {"t.py": text}, options=[OPTION], values={"num_workers": 0})
    made = patch_of([facts], {"loader.num_workers": 4, "loader.persistent_workers": True})
    assert not made.left_out
    then = text.replace("default=0", "default=4").replace(beside, after).splitlines()
    changed = [line for line in then if line not in text.splitlines()]
    assert applied(tmp_path, made.text)["t.py"].splitlines() == changed


def test_both_values_of_one_literal_are_not_set(tmp_path: Path) -> None:
    text = LOADER + "n = 4\nx = DataLoader(data, batch_size=n, num_workers=n)\n"
    facts = written(tmp_path, {"t.py": text}, values={"num_workers": 4, "batch_size": 4})
    made = patch(calls_of([facts]), wanted_of({"loader.num_workers": 8, "loader.batch_size": 16}))
    assert (made.text, made.left_out[0][2]) == ("", "another change sets the same value")
    assert "n = 8\n" in patch_of([facts], {"loader.num_workers": 8, "loader.batch_size": 8}).text


def test_a_report_shows_name_and_value_alone(tmp_path: Path) -> None:
    files = {"t.py": KEYS, "c.yaml": "token: hunter2\ndata: {key: hunter2, workers: 0, a: hunter2}  # hunter2\n"}
    made = patch_of([written(tmp_path, files)], {"loader.num_workers": 12})
    assert made.shown == "--- a/c.yaml\n+++ b/c.yaml\n@@ -2 +2 @@\n-… workers: 0\n+… workers: 12\n"
    assert "hunter2, workers: 12, a" in made.text
    files = {"t.py": ARGS, "a.sh": "export TOKEN=hunter2\n  python t.py --token hunter2 --workers 0 --user hunter2\n"}
    made = patch_of(
        [written(tmp_path, files, "--token hunter2 --workers 0 --user hunter2", options=[OPTION])],
        {"loader.num_workers": 8},
    )
    assert made.shown.splitlines()[2:] == ["@@ -2 +2 @@", "-  … --workers 0", "+  … --workers 8"]


def test_a_finding_names_the_line_that_gives_the_value(tmp_path: Path) -> None:
    def placed_change(options: list[dict[str, Any]], line: str = "") -> Change:
        (call,) = calls_of([written(tmp_path, {"t.py": ARGS}, line, options=options)])
        outcome = Outcome("input_wait", "found", "Found", changes=(change("more", num_workers=(0, 8)),))
        return placed(outcome, (), source([call])).changes[0]

    found = placed_change([OPTION])
    assert found.at is not None
    assert (found.at.file, found.at.line, found.no_diff) == ("t.py", 4, "")
    assert "+p.add_argument('--workers', type=int, default=8)\n" in found.diff
    assert placed_change([OPTION], "--workers 0").no_diff == f"t.py:6: num_workers is `args.workers` there: {SET}"


RECORDED = """
import argparse, json, yaml, torch
from dataclasses import dataclass
from torch.utils.data import DataLoader

@dataclass
class Config:
    name: str = "x"
    workers: int = 0

def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", "-j", type=int, default=0)
    return parser.parse_args()

def make(workers):
    return DataLoader(data, num_workers=workers)

def main(args):
    with open("conf/c.yaml") as file:
        conf = yaml.safe_load(file)
    hf = json.load(open("hf.json"))
    cfg = Config("y")
    loaders = [
        make(args.jobs),
        DataLoader(data, num_workers=cfg.workers),
        DataLoader(data, num_workers=conf["data"]["n_workers"]),
        DataLoader(data, num_workers=hf["dataloader_num_workers"]),
    ]
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for loader in loaders:
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

data = torch.randn(8, 2)
if __name__ == "__main__":
    main(parse())
"""


@pytest.mark.long
def test_a_recorded_job_has_the_new_values_once_its_files_are_edited(tmp_path: Path) -> None:
    """An option, a field and two keys give four loaders their workers; each takes another value."""
    job = tmp_path / "job"
    (job / "conf").mkdir(parents=True)
    (job / "train.py").write_text(COMPILES_NOTHING + RECORDED)
    (job / "conf/c.yaml").write_text("# of the cluster\ndata:\n  n_workers: 0  # few\n")
    (job / "hf.json").write_text('{"output_dir": "out", "dataloader_num_workers": 0}\n')

    def recorded(name: str) -> Any:
        record(job / "train.py", folder=tmp_path / name, options=["--no-trace"])
        return recorded_facts(tmp_path / name / "ranks/00000")

    facts = recorded("before")
    assert [one["num_workers"] for one in facts["loaders"]] == [0, 0, 0, 0]
    calls = sorted((one for one in calls_of([facts]) if one.kind == "loader"), key=lambda call: call.line)
    made = [patch([call], [Wanted("loader", {"num_workers": n})]) for n, call in enumerate(calls, start=1)]
    assert [one.left_out for one in made] == [()] * 4
    for one in made:
        applied(job, one.text)
    assert (job / "conf/c.yaml").read_text() == "# of the cluster\ndata:\n  n_workers: 3  # few\n"
    assert [one["num_workers"] for one in recorded("after")["loaders"]] == [1, 2, 3, 4]


CONVOLVES = """import torch
from torch import nn

def main():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    net(torch.zeros(1, 3, 8, 8))
    model = net.to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        images, target = torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)
        loss = nn.functional.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

main()
"""


@pytest.mark.slow
def test_a_recorded_model_and_its_images_are_laid_out_by_an_edit(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    (job / "train.py").write_text(COMPILES_NOTHING + CONVOLVES)

    def recorded(name: str) -> Any:
        record(job / "train.py", folder=tmp_path / name, options=["--no-trace"])
        return recorded_facts(tmp_path / name / "ranks/00000")

    facts = recorded("before")
    made = patch_of([facts], {"model.memory_format": "channels_last"})
    assert made.left_out == ()
    assert applied(job, made.text)["train.py"] == (
        '    model = net.to("cpu").to(memory_format=torch.channels_last)\n'
        "        loss = nn.functional.cross_entropy(model(images.to(memory_format=torch.channels_last)), target)\n"
    )
    laid_out = [bool(of["models"][0].get("channels_last")) for of in (facts, recorded("after"))]
    assert laid_out == [False, True]
    unsure = {**facts, "calls": [one for one in facts["calls"] if one["kind"] not in ("model", "optimizer")]}
    ((name, _, why),) = patch_of([unsure], {"model.memory_format": "channels_last"}).left_out
    assert (name, why) == ("memory_format", "it is not sure which expressions are the model and its images")


TRAINER = {"via": "Trainer._get_dataloader (transformers/trainer.py:1051)"}
TRAIN = "from transformers import *\n{}\nTrainer(model, args).train()\n"
PARSES = "(args,) = HfArgumentParser(C).parse_{}"


@pytest.mark.parametrize(
    ("args", "config", "after"),
    [
        ("args = TrainingArguments('out')", "{}", "args = TrainingArguments('out', dataloader_num_workers=8)\n"),
        ("N = 0\nargs = TrainingArguments('out', dataloader_num_workers=N)", "{}", "N = 8\n"),
        (PARSES.format("json_file(f)"), '{"dataloader_num_workers": 0\n}', '{"dataloader_num_workers": 8\n'),
        (PARSES.format("args_into_dataclasses()"), "{}", "set --dataloader_num_workers 8"),
        (f"args = TrainingArguments('out')\n{PARSES.format('json_file(f)')}", "{}", "makes the call"),
        ("args = [TrainingArguments('a'), TrainingArguments('b')]", "{}", "makes the call"),
    ],
)
def test_the_loader_of_a_trainer_has_its_arguments(tmp_path: Path, args: str, config: str, after: str) -> None:
    options = [{"name": "--dataloader_num_workers", "dest": "dataloader_num_workers"}]
    facts = written(tmp_path, {"t.py": TRAIN.format(args), "a.json": config}, options=options)
    made = patch_of([facts], {"loader.num_workers": 8})
    if made.left_out:
        assert made.text == ""
        assert after in made.left_out[0][2]
    else:
        assert [*applied(tmp_path, made.text).values()] == [after]
