"""Follows the argument of a call back to where its value stands, and sets it there.

That is a literal in a source, a key of a file of configuration (YAML, JSON, TOML), or a word in the line of a shell
that starts the job. A text is edited, and never written anew. It is parsed before and after: only the one value may be
another.

A variable is followed through its scope: assignments, parameters, imports. An attribute or key may be set wherever one
of that name is set, whatever the object. Of all the places that are found, exactly one must have the recorded value.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from dlprof.analysis.source import edits
from dlprof.analysis.source.edits import Call, Lines, NotEditable, Recorded, Value, given_value, is_literal, last_word

_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
_MOST_PLACES = 16


@dataclass(frozen=True)
class Change:
    """Bytes of a file that others replace; `line`: of the file, from 1."""

    file: str
    begin: int
    end: int
    new: bytes
    line: int


def mentions(job: Recorded, key: str, names: Iterable[str] = ()) -> bool:
    """Return whether the command line may give an option of that key or those names, or a key as Hydra takes it."""

    def bare(name: str) -> str:
        return name.lstrip("+~-").replace("-", "").replace("_", "").lower()

    letters = {name[1] for name in names if len(name) == 2}
    long = {bare(key), *(bare(name) for name in names if len(name) > 2)}
    for word in job.argv[1:]:
        name, equals, _ = word.partition("=")
        last = bare(re.split(r"[.:/]", name)[-1]).removeprefix("no")
        # argparse takes the begin of a name, and several letters together.
        begins = name.startswith("--") and last and any(one.startswith(last) for one in long)
        lettered = name.startswith("-") and not name.startswith("--") and not letters.isdisjoint(name)
        if begins or lettered or (last in long and (equals or name.startswith("-"))):
            return True
    return False


def keys_of(job: Recorded, name: str) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Return where the files that the script opened have a key of that name: file, keys that lead there, value."""
    files = [file for file in job.files if file.endswith(_SUFFIXES)]
    found = []
    for file in files:
        try:
            tree = _tree(file, text) if name.encode() in (text := job.read(file)) else {}
        except NotEditable as e:
            raise NotEditable(f"{file}: {e}") from None
        for keys, value in _items(tree):
            is_plain = value is None or isinstance(value, (bool, int, float, str))
            found += [(file, keys, value if is_plain else repr(value))] if keys[-1] == name else []
    return found


@lru_cache(maxsize=64)
def _tree(file: str, text: bytes) -> Any:
    """Return what a file holds; raise NotEditable where it cannot be parsed here."""
    try:
        if file.endswith(".json"):
            return json.loads(text)
        if file.endswith(".toml"):
            return import_module("tomllib").loads(text.decode())
        yaml = import_module("yaml")
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise NotEditable("aliases are not followed")
        return yaml.safe_load(text)
    except NotEditable:
        raise
    except ImportError as e:
        raise NotEditable(f"{e.name} is not installed beside dlprof") from None
    except Exception:  # noqa: BLE001 - of three parsers, on any text
        raise NotEditable("it cannot be parsed") from None


def _items(tree: Any, inside: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the keys that lead to each value, and the value."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*inside, key), value
        yield from _items(value, (*inside, key))


def key_changed(job: Recorded, file: str, keys: tuple[Any, ...], wanted: Value) -> Change:
    """Return the change of the value of a key; raise NotEditable where it cannot be told in the text."""
    text = job.read(file)
    before = dict(_items(_tree(file, text)))
    after = {
        path: repr(wanted if path == keys else value)
        for path, value in before.items()
        if path != keys[: len(path)] or path == keys
    }
    pattern = rf"""(?<![\w-])["']?{re.escape(keys[-1])}["']?\s*[:=]\s*([^\s,\]}}#]+)"""
    found = []
    for match in [*re.finditer(pattern.encode(), text)][:_MOST_PLACES]:
        begin, end = match.span(1)
        change = Change(file, begin, end, json.dumps(wanted).encode(), text.count(b"\n", 0, begin) + 1)
        try:
            made = _tree(file, text[:begin] + change.new + text[end:])
        except NotEditable:
            continue
        # As text: True is 1 for Python.
        got = {path: repr(value) for path, value in _items(made) if path != keys[: len(path)] or path == keys}
        found += [change] if got == after else []
    if len(found) != 1:
        raise NotEditable(f"{keys[-1]} is written in a way that is not edited in {file}")
    return found[0]


def in_shell(job: Recorded, names: Sequence[str], known: Value, wanted: Value) -> Change:
    """Return the change of an option's value in the one line of a Makefile or script that starts the job with it."""
    options = {word.partition("=")[0] for word in job.argv[1:] if word.startswith("-")}
    script = re.escape(Path(job.argv[0]).stem if job.argv else "")
    pattern = rf"(?<![\w./-])(?:{'|'.join(map(re.escape, names))})[ =]+({re.escape(str(known))})(?![\w.])"
    found = []
    for file in job.files if script and names else ():
        try:
            text = "" if file.endswith((*_SUFFIXES, ".py")) else job.read(file).decode()
            # A line goes on after a backslash.
            for line in re.finditer(r"(?:[^\n\\]|\\[\s\S])+", text):
                words = shlex.split(line[0].replace("\\\n", " "), comments=True)
                starts = any(re.search(rf"(^|[/.]){script}(\.py)?$", word) for word in words)
                if starts and options <= {word.partition("=")[0] for word in words}:
                    for match in re.finditer(pattern, line[0]):
                        begin = len(text[: line.start() + match.start(1)].encode())
                        at = text.count("\n", 0, line.start() + match.start(1)) + 1
                        found.append(Change(file, begin, begin + len(match[1].encode()), str(wanted).encode(), at))
        except (NotEditable, ValueError):  # noqa: PERF203 - not as it was, or written in another way
            continue
    if len(found) != 1:
        raise NotEditable("the command line gives it")
    return found[0]


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_MOST_NAMES = 16

# Functions that set an attribute or key by name, or return an object of their keywords.
_SETS = frozenset(("setattr", "update", "set_defaults", "setdefault", "__setattr__", "replace", "_replace", "evolve"))
_MAKES = frozenset(("dict", "Namespace", "SimpleNamespace", "field", "edict", "EasyDict"))


class Computed(NotEditable):
    """A value is computed, or set in a way that is not followed: no option or key alone gives it."""


@dataclass(frozen=True)
class Found:
    """A place that may give the value: a literal in a source, a key (`keys`) of a file, or the option of that name."""

    key: str
    file: str = ""
    value: Any = None
    node: Any = None
    keys: tuple[Any, ...] = ()


class Source:
    """A source of the script, and what is called, defined and set in it, by name."""

    def __init__(self, text: bytes) -> None:
        self.text = edits.utf8(text)
        self.tree = edits.parsed(self.text)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.defined: dict[str, list[Any]] = defaultdict(list)  # functions and classes
        self.calls: dict[str, list[ast.Call]] = defaultdict(list)
        self.loads: Counter[str] = Counter()
        self.globals: set[str] = set()
        # What attributes, keys, fields and names of modules are set to; None: to something else than an expression.
        self.sets: dict[str, list[tuple[ast.AST, ast.expr | None]]] = defaultdict(list)
        for node in ast.walk(self.tree):
            self.parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
            self._index(node)

    def _index(self, node: Any) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            self.loads[last_word(node)] += 1
        elif isinstance(node, ast.Name) and not isinstance(self.scopes(node)[0], _FUNCTION):
            self.sets[node.id] += self._set_to(node)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            self.sets[_word(node)] += self._set_to(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                self.sets[str(key.value) if isinstance(key, ast.Constant) else ""].append((node, value))
        elif isinstance(node, ast.Call):
            self.calls[word := last_word(node.func)].append(node)
            for keyword in node.keywords if word in _SETS | _MAKES else ():
                self.sets[keyword.arg or ""].append((node, keyword.value))
            for text in _texts(node) if word in _SETS else ():
                self.sets[text.rpartition(".")[2]].append((node, node.args[-1]))
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            self.globals.update(node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.defined[node.name].append(node)
            if isinstance(self.parents[node], ast.ClassDef):
                self.sets[node.name].append((node, None))

    def _set_to(self, node: ast.AST) -> list[tuple[ast.AST, ast.expr | None]]:
        parent = self.parents[node]
        if isinstance(parent, ast.AnnAssign) and parent.value is None:
            return []
        plain = isinstance(parent, (ast.Assign, ast.AnnAssign))
        return [(node, parent.value if plain else None)]  # type: ignore[attr-defined]

    def scopes(self, node: ast.AST) -> list[Any]:
        """Return the functions, classes and module around a node, the innermost first."""
        found = []
        while node in self.parents:
            node = self.parents[node]
            found += [node] if isinstance(node, (*_FUNCTION, ast.ClassDef, ast.Module)) else []
        return found or [self.tree]

    def bound(self, scope: ast.AST, name: str) -> list[Any]:
        """Return what binds a name in a scope: pairs of a node and its value, parameters, imports, other nodes."""
        found: list[Any] = []
        todo = [*ast.iter_child_nodes(scope)]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
                found += self._set_to(node)
            elif isinstance(node, ast.arg):
                found += [node] if node.arg == name else []
            elif isinstance(node, ast.alias):
                found += [node] if name == (node.asname or node.name) else []
            elif name in (getattr(node, "name", None), getattr(node, "rest", None)):
                found.append(node)
            if not isinstance(node, (*_FUNCTION, ast.ClassDef)):
                todo += ast.iter_child_nodes(node)
        return found


@lru_cache(maxsize=256)
def _source(text: bytes) -> Source:
    return Source(text)


class Origins:
    """Follows the argument of a call that is to have a setting."""

    def __init__(self, call: Call, setting: str, wanted: Value) -> None:
        self._call, self._job = call, call.job
        self._setting, self._wanted = setting, wanted
        self._paths: set[tuple[str, ...]] = set()  # that attributes and keys were read by
        self._variables: set[tuple[ast.AST, str]] = set()

    def change(self, given: ast.expr) -> Change:
        """Return the change that gives the argument its wanted value; raise NotEditable where it is not sure."""
        shown = f"{self._setting} is `{ast.unparse(given)[:60]}` there"
        shown = shown if self._call.line else "transformers' Trainer makes the call"
        if self._call.file not in self._job.files:
            raise NotEditable(shown)
        try:
            if not self._call.line:
                found = {*self._of_key((self._setting,))}
            else:
                tree = self._sources[self._call.file].tree
                mine: Any = given_value(edits.find(tree, self._call.span, self._call.kind), self._setting)
                found = {*self._places(mine, self._call.file, self._setting)}
            known = self._call.values.get(self._setting)
            if known is not None:
                found = {one for one in found if not one.file or (type(one.value), one.value) == (type(known), known)}
            if len(found) > 1 and all(one.keys for one in found):
                found = {one for one in found if any(len(p) > 1 and one.keys[-2:] == p[-2:] for p in self._paths)}
            if len(found) != 1:
                raise NotEditable("where it is given was not found, or in several places")
            return self._edit(found.pop(), known)
        except Computed as e:
            raise NotEditable(f"{shown}: {e}") from None
        except NotEditable as e:
            raise NotEditable(f"{shown}: {self._advice() or e}") from None
        except RecursionError:
            raise NotEditable(shown) from None

    def _advice(self) -> str:
        """Return what the user can set instead: the option, or else the key, of a name that was met on the way."""
        names = {path[-1] for path in self._paths}
        rows = [row for row in self._job.options if row.get("dest") in names]
        if len(rows) == 1:
            return f"set {rows[0]['name']}" + ("" if rows[0].get("switch") else f" {self._wanted}")
        keys = [one for name in names for one in keys_of(self._job, name)]
        return f"set {'.'.join(map(str, keys[0][1]))}: {self._wanted} in {keys[0][0]}" if len(keys) == 1 else ""

    # -- places

    def _places(self, node: ast.expr, file: str, key: str) -> Iterator[Found]:
        """Yield the places that may give an expression its value. `key`: the last name that it had."""
        called = last_word(node.func) if isinstance(node, ast.Call) else ""
        if is_literal(node):
            yield Found(key, file, ast.literal_eval(node), node)
        elif isinstance(node, ast.Name):
            yield from self._of_name(node.id, node, file)
        elif isinstance(node, ast.Call) and called in ("int", "bool") and len(node.args) == 1:
            yield from self._places(node.args[0], file, key)
        elif isinstance(node, ast.Call) and called in ("field", "Field", "Option"):
            default = given_value(node, "default") or next(iter(node.args), node.func)
            yield from self._places(default, file, key)
        elif (member := _member(node)) is not None and "environ" not in ast.unparse(node):
            found = [*self._of_key(member[0])]
            yield from found
            yield from self._places(member[1], file, key) if member[1] is not None and not found else ()
        else:
            raise Computed(f"{key} is computed at {file}:{node.lineno}")

    def _of_key(self, path: tuple[str, ...]) -> Iterator[Found]:
        """Yield the places that set an attribute or key of that name, of any object."""
        key, names = path[-1], {one[-1] for one in self._paths}
        self._paths.add(path)
        if key in names:
            return
        if len(names) > _MOST_NAMES:
            raise Computed("it leads too far")
        yield from (Found(key, file, value, keys=keys) for file, keys, value in keys_of(self._job, key))
        rows, added = self._options(key)
        is_given = bool(rows or added) and mentions(self._job, key, self._names(key))
        if is_given:
            yield Found(key)
        for file, call in added if not is_given else ():
            if self._is_parsed_otherwise(seen=bool(rows)):
                raise Computed("what the command line gives was not recorded")
            if (default := given_value(call, "default")) is not None:
                yield from self._places(default, file, key)
        for file, source in self._sources.items():
            for node, value in source.sets[key]:
                if value is None:
                    raise Computed(f"{key} is set again at {file}:{getattr(node, 'lineno', 0)}")
                yield from self._places(value, file, key)
            for cls, call in (
                (c, call) for name in source.calls for c in self._classes(name) for call in source.calls[name]
            ):
                fields = [last_word(one.target) for one in cls.body if isinstance(one, ast.AnnAssign)]
                for argument in _arguments(call, key, fields) if key in fields else ():
                    yield from self._places(argument, file, key) if argument is not None else ()

    def _of_name(self, name: str, node: ast.expr, file: str) -> Iterator[Found]:
        """Yield the places that may give a variable its value."""
        source = self._sources[file]
        scopes = source.scopes(node)
        visible = [scope for scope in scopes if scope is scopes[0] or not isinstance(scope, ast.ClassDef)]
        scope = next((scope for scope in visible if source.bound(scope, name)), None)
        if scope is None:
            raise Computed(f"{name} is not set in {file}")
        if (scope, name) in self._variables:
            return
        self._variables.add((scope, name))
        if name in source.globals or (scope is source.tree and (source.calls["exec"] or source.calls["globals"])):
            raise Computed(f"{name} may be set by other code")
        for one in source.bound(scope, name):
            if isinstance(one, ast.arg):
                yield from self._of_parameter(scope, name, file)
            elif isinstance(one, ast.alias):
                yield from self._of_key((one.name,))
            elif isinstance(one, tuple) and one[1] is not None:
                yield from self._places(one[1], file, name)
            else:
                raise Computed(f"{name} is computed in {file}")

    def _of_parameter(self, function: Any, name: str, file: str) -> Iterator[Found]:
        """Yield the places that give a parameter its value: in the calls of its function, or its default."""
        around = self._sources[file].parents[function]
        owner = around if getattr(function, "name", "") == "__init__" else function
        called, every = getattr(owner, "name", ""), self._sources.items()
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
        pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        default = next((value for one, value in pairs if one.arg == name), None)
        decorators = [one for one in getattr(function, "decorator_list", ()) if isinstance(one, ast.Call)]
        options = [one for one in decorators if last_word(one.func) == "option" and _dest(one) == name]
        given: list[tuple[ast.expr | None, str]] = []
        if options:
            default = None if given_value(options[0], "envvar") else given_value(options[0], "default")
        if options or any(last_word(one.func) == "command" for one in decorators):  # click's and typer's
            if any(mentions(self._job, name, _texts(one)) for one in options):
                raise Computed(f"the command line gives {name}")
        else:
            names = [one.arg for one in positional][isinstance(around, ast.ClassDef) :]
            calls = [(call, where) for where, each in every for call in each.calls[called]]
            given = [(one, where) for call, where in calls for one in _arguments(call, name, names)]
            passed_on = owner is function and sum(each.loads[called] for _, each in every) > len(calls)
            if owner is around and not calls and keys_of(self._job, name):
                # A library makes the object, such as Lightning's of what a file has.
                yield from self._of_key((name,))
                return
            if not given or passed_on or sum(len(each.defined[called]) for _, each in every) != 1:
                raise Computed(f"what {called or 'a lambda'} gets for {name} was not found")
        # A decorator may pass something else, as gin's does.
        is_decorated = bool(given) and any(getattr(one, "decorator_list", ()) for one in (owner, function))
        for argument, where in given or [(None, file)]:
            if (argument or default) is None or (argument is None and is_decorated):
                raise Computed(f"{name} has no default that is sure")
            yield from self._places(argument or default, where if argument else file, name)  # type: ignore[arg-type]

    def _is_parsed_otherwise(self, *, seen: bool) -> bool:
        """Return whether options may come from files or other words; `seen`: the recorder saw them parsed.

        It does not before torch is imported, nor in a process that is no rank.
        """
        for source in self._sources.values():
            calls = [call for word in ("parse_args", "parse_known_args") for call in source.calls[word]]
            if (not seen and any(call.args or call.keywords for call in calls)) or source.loads["configargparse"]:
                return True
            if any(given_value(call, "fromfile_prefix_chars") for call in source.calls["ArgumentParser"]):
                return True
        return False

    def _names(self, key: str) -> list[str]:
        """Return what the option of a key is called on the command line."""
        rows, added = self._options(key)
        return [str(row["name"]) for row in rows] + [text for _, call in added for text in _texts(call)]

    def _options(self, key: str) -> tuple[list[Mapping[str, Any]], list[tuple[str, ast.Call]]]:
        """Return the options that give a key: as recorded, and the calls that add them, with their files."""
        added = [(f, call) for f, s in self._sources.items() for call in s.calls["add_argument"] if _dest(call) == key]
        return [row for row in self._job.options if row.get("dest") == key], added

    def _classes(self, name: str) -> list[ast.ClassDef]:
        return [one for each in self._sources.values() for one in each.defined[name] if isinstance(one, ast.ClassDef)]

    # -- edits

    def _edit(self, one: Found, known: Value) -> Change:
        if not one.file or mentions(self._job, one.key):
            return in_shell(
                self._job, self._names(one.key) or [".".join(map(str, one.keys)), f"--{one.key}"], known, self._wanted
            )
        if one.keys:
            return key_changed(self._job, one.file, one.keys, self._wanted)
        source, node = self._sources[one.file], one.node
        begin, end = Lines(source.text).span(node)
        new = edits.literal(self._wanted, source.text)
        try:
            same, node.value = node.value, ast.literal_eval(new.decode())
            wanted = ast.dump(source.tree)
            node.value = same
            made = ast.dump(ast.parse(source.text[:begin] + new + source.text[end:]))
        except (AttributeError, SyntaxError):
            made = wanted = ""
        if not made or made != wanted:
            raise NotEditable(f"{one.key} is written in a way that is not edited at {one.file}:{node.lineno}")
        return Change(one.file, begin, end, new, node.lineno)

    @cached_property
    def _sources(self) -> Mapping[str, Source]:
        """The sources of the script, all of which must be as they were."""
        found = {}
        for file in self._job.files:
            if file.endswith(".py"):
                try:
                    found[file] = _source(self._job.read(file))
                except NotEditable as e:
                    raise Computed(f"{file}: {e}") from None
        return found


def of_trainer(call: Call, settings: Mapping[str, Value]) -> tuple[Call, dict[str, Value]]:
    """Return what gives a loader of transformers' Trainer its settings, and their names there; raise NotEditable.

    That is the call of TrainingArguments, or (`line` 0) a file or the options that HfArgumentParser makes them of.
    """
    read = {file: _source(call.job.read(file)) for file in call.job.files if file.endswith(".py")}
    made = [
        (file, one)
        for file, source in read.items()
        for word in edits.CALLEES["arguments"]
        for one in source.calls[word]
    ]
    parsed = any(source.calls["HfArgumentParser"] for source in read.values())
    if "(transformers/trainer.py:" not in call.via or len(made) + parsed != 1 or "batch_size" in settings:
        raise NotEditable(f"{call.via} makes the call")
    values, named = ({f"{edits.TRAINER}{name}": value for name, value in of.items()} for of in (call.values, settings))
    found = replace(call, kind="arguments", via="", values=values, line=0)
    if made:
        ((file, node),) = made
        digest = call.job.files[file]
        found = replace(found, file=file, digest=digest, line=node.lineno, span=edits.Span.of(node))
    return found, named


def _texts(call: ast.Call) -> list[str]:
    return [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]


def _dest(call: ast.Call) -> str:
    """Return the name of the value of an option that argparse or click is given; "": it is no option."""
    if isinstance(dest := given_value(call, "dest"), ast.Constant):
        return str(dest.value)
    names = _texts(call)
    plain = [name for name in names if name.isidentifier()] if last_word(call.func) == "option" else []
    long = [name for name in names if name.startswith("--")]
    first = next(iter(plain or long or [name for name in names if name.startswith("-")]), "")
    return first.partition("/")[0].lstrip("-").replace("-", "_")


def _arguments(call: ast.Call, name: str, names: Sequence[str]) -> list[ast.expr | None]:
    """Return what a call may give a parameter; None: nothing. `names`: of the parameters by position."""
    if any(isinstance(arg, ast.Starred) for arg in call.args):
        raise Computed(f"{name} may be among the arguments of `*`")
    if (given := given_value(call, name)) is not None:
        return [given] if any(keyword.arg == name for keyword in call.keywords) else [given, None]
    place = names.index(name) if name in names else len(call.args)
    return [call.args[place] if place < len(call.args) else None]


def _member(node: ast.AST) -> tuple[tuple[str, ...], ast.expr | None] | None:
    """Return names and default of o.a.b, o["a"]["b"], o.get("b", d), getattr(o, "b")."""
    default = None
    if isinstance(node, ast.Call):
        is_get = isinstance(node.func, ast.Attribute) and node.func.attr == "get"
        if node.keywords or not (is_get or last_word(node.func) == "getattr"):
            return None
        given = [node.func.value, *node.args] if isinstance(node.func, ast.Attribute) else node.args
        if len(given) < 2:
            return None
        default = given[2] if len(given) > 2 else None
        node = ast.Subscript(given[0], given[1], ast.Load())
    path: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if not (word := _word(node)):
            return None
        path.insert(0, word)
        node = node.value
    return (tuple(path), default) if path else None


def _word(node: ast.Attribute | ast.Subscript) -> str:
    """Return the name of an attribute or key; "": it is no plain text."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return str(node.slice.value) if isinstance(node.slice, ast.Constant) else ""
