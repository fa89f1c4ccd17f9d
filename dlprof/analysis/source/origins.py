"""Follows the argument of a call back to where its value stands: a literal in a source, an option of argparse or click,
a key of a file of configuration, or a word in the line of a shell that starts the job.

It looks at all sources of the script that were loaded. Names are followed through assignments, parameters (to all calls
of the function), results, attributes, dicts and imports. What could be set in two places, or is computed, is not edited.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from dlprof.analysis.source.configuration import Change, in_configuration, in_shell, mentions
from dlprof.analysis.source.edits import Call, Lines, NotEditable, Value, find, given_value, is_literal, literal, parsed
from dlprof.analysis.source.edits import utf8

_MOST_STEPS = 200
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_Scope = (*_Function, ast.ClassDef, ast.Lambda)

# Functions by the last word of their names: what reads a command line, what reads a file, what returns its argument.
_PARSES = frozenset("parse_args parse_known_args parse_intermixed_args parse_args_into_dataclasses".split())
_READS = frozenset("parse_json_file parse_yaml_file safe_load compose".split())
_READERS = frozenset("yaml json toml tomllib tomli OmegaConf omegaconf".split())  # load, loads, safe_load, …
_SAME = frozenset(
    "vars dict deepcopy copy edict easydict attrdict dotdict munch munchify box namespace simplenamespace create"
    " to_container".split()
)
# What sets an attribute or key that it gets by name.
_SETS = frozenset("setattr update set_defaults setdefault __setattr__ __setitem__ replace _replace evolve".split())


@dataclass(frozen=True, eq=False)
class At:
    """An expression, and its file."""

    node: ast.expr
    file: str


@dataclass(frozen=True)
class Owner:
    """What an attribute or key is read from.

    `kind`: "options" (a namespace of argparse), "keys" (of a file, below `path`), "class" (an object of it, or itself),
    "dict" (a literal), "module".
    """

    kind: str
    file: str = ""
    node: Any = None
    path: tuple[str, ...] = ()
    made: ast.Call | None = None  # the call that made the object


class Source:
    """A source of the script: its tree, and what is called, defined and set in it, by name."""

    def __init__(self, text: bytes) -> None:
        self.text = utf8(text)
        self.tree = parsed(self.text)
        self.scopes: dict[ast.AST, tuple[ast.AST, ...]] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        self.uses: dict[str, list[ast.expr]] = defaultdict(list)  # loads of a name, or of an attribute of that name
        self.defined: dict[str, list[Any]] = defaultdict(list)  # functions and classes
        self.stores: dict[str, list[ast.AST]] = defaultdict(list)  # of attributes and keys
        self.literal_keys: dict[str, list[ast.expr]] = defaultdict(list)  # of dicts: {"workers": 0}
        self.called: dict[str, list[ast.Call]] = defaultdict(list)
        self.named_global: set[str] = set()
        todo: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(self.tree, ())]
        while todo:
            node, scope = todo.pop()
            self.scopes[node] = scope
            self._index(node)
            inner = (*scope, node) if isinstance(node, _Scope) else scope
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                # Decorators and defaults stand outside.
                body = not isinstance(node, _Scope) or isinstance(child, (ast.stmt, ast.arguments))
                todo.append((child, inner if body else scope))

    def _index(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            self.named_global.update(node.names)
        elif isinstance(node, (*_Function, ast.ClassDef)):
            self.defined[node.name].append(node)
        elif isinstance(node, ast.Call):
            word = last_word(node.func)
            self.called[word].append(node)
            if word in _SETS:
                given = {str(a.value).rpartition(".")[2] for a in node.args if isinstance(a, ast.Constant)}
                given |= {
                    str(key.value) for a in node.args if isinstance(a, ast.Dict) for key in a.keys if _is_text(key)
                }
                for name in given | {keyword.arg for keyword in node.keywords if keyword.arg}:
                    self.stores[name].append(node)
            elif word == "dict":
                for keyword in node.keywords:
                    if keyword.arg and is_literal(keyword.value):
                        self.literal_keys[keyword.arg].append(keyword.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if _is_text(key) and is_literal(value):
                    self.literal_keys[key.value].append(value)
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            self.uses[name].append(node)
        elif isinstance(node, ast.Attribute):
            self.stores[name].append(node)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            self.stores[str(node.slice.value) if isinstance(node.slice, ast.Constant) else ""].append(node)

    def bound(self, holder: ast.AST, name: str) -> list[ast.AST]:
        """Return what binds a name in a scope: its statements, parameters, imports and so on."""
        found: list[ast.AST] = []
        todo = [*ast.iter_child_nodes(holder)]
        while todo:
            node = todo.pop()
            at = self.parents[node]
            if isinstance(node, ast.arg):
                found += [node] if node.arg == name and at is getattr(holder, "args", None) else []
            elif isinstance(node, ast.Name):
                if node.id == name and not isinstance(node.ctx, ast.Load):
                    while isinstance(at, (ast.Tuple, ast.List, ast.Starred)):
                        at = self.parents[at]
                    found.append(at)
            elif isinstance(node, ast.alias):
                found += [node] if (node.asname or node.name.partition(".")[0]) == name else []
            elif name in (getattr(node, "name", None), getattr(node, "rest", None)):  # functions, handlers, patterns
                found.append(node)
            if not isinstance(node, _Scope):
                todo += ast.iter_child_nodes(node)
        return found


@lru_cache(maxsize=256)
def source_of(text: bytes) -> Source:
    """Return a source with its index."""
    return Source(text)


def last_word(callee: ast.expr) -> str:
    """Return the last word of a callee's name; "": it has none."""
    return callee.id if isinstance(callee, ast.Name) else callee.attr if isinstance(callee, ast.Attribute) else ""


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


class Origins:
    """Follows one argument of a call that a setting is to be given."""

    def __init__(self, call: Call, setting: str, wanted: Value) -> None:
        self._call = call
        self._job = call.job
        self._setting = setting
        self._wanted = wanted
        self._known = call.values
        self._steps = 0

    def change(self, given: ast.expr) -> Change:
        """Return the replacement that gives the argument its wanted value; raise NotEditable where it is not sure."""
        shown = f"{self._setting} is `{ast.unparse(given)[:60]}` there"
        if not self._job.files:
            raise NotEditable(shown)
        try:
            mine = given_value(
                find(self._source(self._call.file).tree, self._call.span, self._call.kind), self._setting
            )
            assert mine is not None
            return self._value(At(mine, self._call.file), self._setting)
        except NotEditable as e:
            raise NotEditable(f"{shown}: {e}") from None
        except RecursionError:
            raise NotEditable(shown) from None

    # -- values

    def _value(self, at: At, key: str) -> Change:
        """Return the replacement for the value of an expression. `key`: the last name that it had."""
        node = at.node
        if is_literal(node):
            return self._of_literal(at, key)
        if isinstance(node, ast.Call) and last_word(node.func) in ("int", "bool") and len(node.args) == 1:
            return self._value(At(node.args[0], at.file), key)
        if isinstance(node, ast.Name):
            return self._agreed(self._named(node.id, at), lambda one: self._value(one, node.id))
        if (member := _member(node)) is not None:
            base, key, default = member
            owner = self._owner(At(base, at.file))
            if owner is not None and owner.kind == "options":
                return self._of_option(key)
            if owner is not None and owner.kind == "keys":
                return self._of_key((*owner.path, key), At(default, at.file) if default is not None else None)
            if owner is None:
                raise NotEditable(f"what `{ast.unparse(base)[:60]}` is was not found")
            return self._agreed(self._of_member(owner, key), lambda one: self._value(one, key))
        raise NotEditable("it is computed")

    def _agreed(self, ways: Sequence[At | Change], of: Callable[[At], Change]) -> Change:
        """Return what all ways lead to."""
        self._step()
        found = {one if isinstance(one, Change) else of(one) for one in ways}
        if len(found) != 1:
            raise NotEditable("it is given in several places" if found else "where it is given was not found")
        return found.pop()

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise NotEditable("it leads too far")

    def _of_literal(self, at: At, key: str) -> Change:
        value = ast.literal_eval(at.node)
        self._check(key, value)
        if mentions(self._job, key):
            raise NotEditable(f"the command line gives {key}")
        if in_configuration(self._job, (key,), None):
            raise NotEditable(f"a file that the script opened has {key}, too")
        source = self._source(at.file)
        lines = Lines(source.text)
        begin, end = lines.span(at.node)
        new = literal(self._wanted, source.text)
        after = source.text[:begin] + new + source.text[end:]
        _check_tree(source, at.node, new, after)
        return Change(at.file, begin, end, new, at.node.lineno)

    def _check(self, key: str, value: Value) -> None:
        """Raise NotEditable where a value is not the recorded one, or is set again elsewhere."""
        known = self._known.get(self._setting, value)
        if (type(known), known) != (type(value), value):
            raise NotEditable(f"{key} is {value!r} where it begins, and was {known!r}")
        if value == self._wanted:
            raise NotEditable(f"{key} is {value!r} already")
        self._check_stores(key)

    def _check_stores(self, key: str, *, literals: bool = False) -> None:
        """Raise NotEditable where an attribute or key of that name is set, but on an object by its own methods."""
        for file, source in self._sources.items():
            for node in (*source.stores[key], *(source.literal_keys[key] if literals else ())):
                if not self._is_own(source, node):
                    raise NotEditable(f"{key} is set again at {file}:{getattr(node, 'lineno', 0)}")

    def _is_own(self, source: Source, node: ast.AST) -> bool:
        """Return whether what is set is an attribute of an object, in a method of its class."""
        base = node.value if isinstance(node, ast.Attribute) else None
        return isinstance(base, ast.Name) and base.id == "self" and isinstance(source.parents.get(node), ast.Assign)

    def _of_option(self, dest: str) -> Change:
        """Return the change of an option's default, or of the line that gives it."""
        rows = [row for row in self._job.options if row.get("dest") == dest and row.get("name")]
        if len(rows) != 1:
            raise NotEditable(f"no option gives {dest}, or several do")
        name = str(rows[0]["name"])
        said = f"set {name}" if rows[0].get("switch") else f"set {name} {self._wanted}"
        known = self._known.get(self._setting)
        self._check_stores(dest)
        if rows[0].get("given", True) or mentions(self._job, dest):
            names = [*dict.fromkeys((name, *self._spellings(dest)))]
            found = None if known is None else in_shell(self._job, names, known, self._wanted)
            if found is None:
                raise NotEditable(said)
            return found
        added = [(one, f) for f, s in self._sources.items() for one in s.called["add_argument"] if _dest(one) == dest]
        fields = [] if added else [*self._fields(dest)]
        try:
            if len(added) == 1 and not fields:
                call, file = added[0]
                given = {keyword.arg: keyword.value for keyword in call.keywords}
                action = given.get("action")
                plain = action is None or last_word(action) == "BooleanOptionalAction"
                if None not in given and "default" in given and "choices" not in given and plain:
                    return self._value(At(given["default"], file), dest)
            elif len(fields) == 1:
                return self._value(fields[0], dest)
        except NotEditable as e:
            raise NotEditable(f"{said} ({e})") from None
        raise NotEditable(said)

    def _spellings(self, dest: str) -> Iterator[str]:
        for source in self._sources.values():
            for call in source.called["add_argument"]:
                if _dest(call) == dest:
                    yield from (str(arg.value) for arg in call.args if isinstance(arg, ast.Constant))

    def _fields(self, name: str) -> Iterator[At]:
        """Yield the defaults of a field in the dataclasses of the script."""
        for file, source in self._sources.items():
            for cls in (cls for classes in source.defined.values() for cls in classes if _is_data(cls)):
                for node in cls.body:
                    if isinstance(node, ast.AnnAssign) and _id(node.target) == name and node.value is not None:
                        yield At(_default(node.value), file)

    def _of_key(self, path: tuple[str, ...], default: At | None) -> Change:
        key, known = path[-1], self._known.get(self._setting)
        said = f"set {'.'.join(path)}: {self._wanted}"
        if known is None and self._setting not in self._known:
            raise NotEditable(said)
        if default is not None and not in_configuration(self._job, path, None) and not mentions(self._job, key):
            return self._value(default, key)
        self._check_stores(key, literals=True)
        if any(row.get("dest") == key for row in self._job.options):
            raise NotEditable(f"{said}; an option is called {key}, too")
        if mentions(self._job, key):
            found = in_shell(self._job, [".".join(path), f"--{'.'.join(path)}"], known, self._wanted)
            if found is None:
                raise NotEditable(f"set {'.'.join(path)}={self._wanted}")
            return found
        places = in_configuration(self._job, path, (known, self._wanted))
        if len(places) != 1:
            raise NotEditable(said if not places else f"{said}; several files have it")
        return places[0]

    # -- what an expression stands for

    def _named(self, name: str, at: At) -> list[At | Change]:
        """Return the expressions that a name stands for."""
        source = self._source(at.file)
        scope = source.scopes.get(at.node, ())
        if name in source.named_global:
            raise NotEditable(f"{name} is a global that functions set")
        for n in range(len(scope), -1, -1):
            holder: Any = scope[n - 1] if n else source.tree
            if isinstance(holder, ast.ClassDef) and n != len(scope):
                continue
            bound = source.bound(holder, name)
            if bound:
                break
        else:
            raise NotEditable(f"{name} is not defined in its file")
        if len(bound) != 1:
            raise NotEditable(f"{name} is set in several places")
        (one,) = bound
        if not n:
            self._check_stores(name)
            if any(s.called[word] for s in self._sources.values() for word in ("exec", "globals")):
                raise NotEditable(f"{name} may be set by text that is run")
        if isinstance(one, ast.arg):
            return self._given(holder, name, at.file)
        if isinstance(one, (ast.Assign, ast.AnnAssign)) and one.value is not None:
            plain = isinstance(one, ast.AnnAssign) or all(isinstance(target, ast.Name) for target in one.targets)
            several = isinstance(one.value, ast.Call) and last_word(one.value.func) in _PARSES | _READS
            if plain or several:
                return [At(one.value, at.file)]
        if isinstance(one, ast.alias) and isinstance(statement := source.parents[one], ast.ImportFrom):
            file = self._module(statement.module or "", statement.level, at.file)
            return self._named(one.name, At(self._source(file).tree, file))  # type: ignore[arg-type]
        raise NotEditable(f"{name} is not set by a plain assignment")

    def _module(self, name: str, level: int, file: str) -> str:
        """Return the file of a module of the script's."""
        around = file.split("/")[:-level] if level else []
        path = "/".join([*around, *filter(None, name.split("."))])
        folders = (
            ("",) if level else ("", *(f"{'/'.join(file.split('/')[:n])}/" for n in range(1, file.count("/") + 1)))
        )
        found = {f for b in folders for end in (".py", "/__init__.py") if (f := f"{b}{path}{end}") in self._sources}
        if len(found) != 1:
            raise NotEditable(f"the file of {name} was not found")
        return found.pop()

    def _given(self, function: Any, name: str, file: str) -> list[At | Change]:
        """Return what a function gets for a parameter, from all its calls, or its default."""
        if isinstance(function, ast.Lambda):
            raise NotEditable(f"{name} is given to a lambda")
        clicked = [d for d in function.decorator_list if isinstance(d, ast.Call) and last_word(d.func) == "option"]
        mine = [d for d in clicked if _dest(d) == name]
        default = _parameter_default(function, name)
        if clicked:
            given = {keyword.arg: keyword.value for keyword in mine[0].keywords} if len(mine) == 1 else {}
            if "default" not in given or {None, "envvar", "type", "callback", "multiple"} & given.keys() - {"type"}:
                raise NotEditable(f"what click gives {name} was not found")
            if any(word.startswith("-") and word.partition("=")[0] in _texts(mine[0]) for word in self._job.argv):
                raise NotEditable(f"the command line gives {name}")
            return [At(given["default"], file)]
        if any(last_word(d.func) == "command" for d in function.decorator_list if isinstance(d, ast.Call)):
            if isinstance(default, ast.Call) and last_word(default.func) in ("Option", "Argument"):
                default = default.args[0] if default.args else None
            if default is None:
                raise NotEditable(f"what typer gives {name} was not found")
            return [At(default, file)]
        found: list[At | Change] = []
        for call, where, shift in self._calls(function, file):
            argument = _argument(function, call, name, shift)
            if argument is None and default is None:
                raise NotEditable(f"{name} is not among the arguments of {function.name}")
            found.append(At(argument, where) if argument is not None else At(default, file))  # type: ignore[arg-type]
        return found

    def _calls(self, function: Any, file: str) -> list[tuple[ast.Call, str, int]]:
        """Return all calls of a function or class of the script: call, its file, leading parameters without argument."""
        source = self._source(file)
        scope = source.scopes[function]
        cls = scope[-1] if scope and isinstance(scope[-1], ast.ClassDef) else None
        shift = 0 if cls is None or any(last_word(d) == "staticmethod" for d in function.decorator_list) else 1
        owner = cls if cls is not None and getattr(function, "name", "") == "__init__" else function
        if sum(len(s.defined[owner.name]) for s in self._sources.values()) != 1:
            raise NotEditable(f"{owner.name} is defined several times")
        found = []
        for where, each in self._sources.items():
            for use in each.uses[owner.name]:
                around = each.parents[use]
                if isinstance(around, ast.Call) and around.func is use:
                    found.append((around, where, shift))
                elif isinstance(around, ast.Call) and last_word(around.func) in ("spawn", "start_processes"):
                    found.append((_spawned(around), where, shift))
                elif isinstance(around, ast.keyword) and around.arg == "default_factory":
                    found.append((ast.Call(use, [], []), where, shift))
                elif not isinstance(around, (ast.arg, ast.AnnAssign)) or getattr(around, "value", None) is use:
                    raise NotEditable(f"{owner.name} is passed on as a value at {where}:{use.lineno}")
        if not found:
            raise NotEditable(f"no call of {owner.name} was found")
        return found

    # -- objects

    def _owner(self, at: At) -> Owner | None:
        """Return what an expression is that an attribute is read from; None: that is not known."""
        self._step()
        node, source = at.node, self._source(at.file)
        if isinstance(node, ast.Name):
            scope = source.scopes.get(node, ())
            method = scope[-1] if scope else None
            if len(scope) > 1 and isinstance(scope[-2], ast.ClassDef) and isinstance(method, _Function):
                if method.args.args and method.args.args[0].arg == node.id:
                    return Owner("class", at.file, scope[-2])
            if (module := self._imported(node.id, at)) is not None:
                return Owner("module", module)
            if (cls := self._class(node.id)) is not None:
                return Owner("class", *cls)
            if self._is_hydra(node.id, scope):
                return Owner("keys")
            owners = {self._owner(one) for one in self._named(node.id, at) if isinstance(one, At)}
            return owners.pop() if len(owners) == 1 else None
        if isinstance(node, ast.Dict):
            return Owner("dict", at.file, node)
        if isinstance(node, ast.Call):
            return self._returned(node, at)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):  # parse_known_args()[0]
            return self._owner(At(node.value, at.file)) if last_word(node.value.func) in _PARSES | _READS else None
        if (member := _member(node)) is not None:
            base, key, _ = member
            owner = self._owner(At(base, at.file))
            if owner is None or owner.kind == "options":
                return None
            if owner.kind == "keys":
                return Owner("keys", path=(*owner.path, key))
            owners = {self._owner(one) for one in self._of_member(owner, key) if isinstance(one, At)}
            return owners.pop() if len(owners) == 1 else None
        return None

    def _returned(self, node: ast.Call, at: At) -> Owner | None:
        """Return what a call makes."""
        word = last_word(node.func)
        functions = [(one, f) for f, s in self._sources.items() for one in s.defined[word]]
        if len(functions) == 1:
            function, file = functions[0]
            if isinstance(function, ast.ClassDef):
                return Owner("class", file, function, made=node)
            inside = self._source(file)
            returns = [n for n in ast.walk(function) if isinstance(n, ast.Return) and inside.scopes[n][-1] is function]
            if len(returns) != 1 or returns[0].value is None or isinstance(function, ast.AsyncFunctionDef):
                return None
            return self._owner(At(returns[0].value, file))
        if functions:
            return None
        scope = self._source(at.file).scopes.get(node, ())
        if word == "cls" and len(scope) > 1 and isinstance(scope[-2], ast.ClassDef):
            return Owner("class", at.file, scope[-2], made=node)
        if word in _PARSES:
            return Owner("options")
        if word in _READS or ast.unparse(node.func).partition(".")[0] in _READERS:
            return Owner("keys")
        passed = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg is None)]
        if word.lower() in _SAME and len(passed) == 1 == len(node.args) + len(node.keywords):
            return self._owner(At(passed[0], at.file))
        if word == "field":
            made = next((k.value for k in node.keywords if k.arg == "default_factory"), None)
            cls = self._class(last_word(made)) if made is not None else None
            return Owner("class", *cls) if cls is not None else None
        return None

    def _of_member(self, owner: Owner, key: str) -> list[At | Change]:
        """Return the expressions that an attribute or key of an object stands for."""
        if owner.kind == "module":
            tree: Any = self._source(owner.file).tree
            return self._named(key, At(tree, owner.file))
        if owner.kind == "dict":
            if None in owner.node.keys:
                raise NotEditable(f"{key} may come from `**`")
            self._check_stores(key)
            found = [
                v for k, v in zip(owner.node.keys, owner.node.values, strict=True) if _is_text(k) and k.value == key
            ]
            return [At(one, owner.file) for one in found[-1:]]
        cls, source = owner.node, self._source(owner.file)
        classes = [one for s in self._sources.values() for defined in s.defined.values() for one in defined]
        if any(last_word(base) == cls.name for one in classes for base in getattr(one, "bases", ())):
            raise NotEditable(f"{cls.name} has subclasses")
        set_there = [n for n in source.stores[key] if cls in source.scopes[n] and self._is_own(source, n)]
        if set_there:
            assign = source.parents[set_there[0]]
            first = source.scopes[set_there[0]][-1]
            if len(set_there) > 1 or getattr(first, "name", "") != "__init__":
                raise NotEditable(f"{key} is set several times in {cls.name}, or not where the object is made")
            return [At(assign.value, owner.file)]  # type: ignore[attr-defined]
        bound = source.bound(cls, key)
        if len(bound) != 1 or not isinstance(bound[0], (ast.Assign, ast.AnnAssign)):
            raise NotEditable(f"where {cls.name} gets {key} was not found")
        default = bound[0].value
        if any(
            isinstance(n, _Function) and n.name in ("__init__", "__getattr__", "__getattribute__") for n in cls.body
        ):
            if isinstance(bound[0], ast.AnnAssign):
                raise NotEditable(f"where {cls.name} gets {key} was not found")
        ways = self._fields_given(owner, key)
        if not ways or None in [getattr(way, "node", 0) for way in ways]:
            if default is None:
                raise NotEditable(f"{key} has no default in {cls.name}")
            ways = [*ways, At(_default(default), owner.file)]
        return [way for way in ways if getattr(way, "node", 0) is not None]

    def _fields_given(self, owner: Owner, key: str) -> list[At | Change]:
        """Return what the calls that make objects of a dataclass pass for a field; At(None): one passes nothing."""
        fields = [_id(n.target) for n in owner.node.body if isinstance(n, ast.AnnAssign)]
        if owner.made is not None:
            file = next(f for f, s in self._sources.items() if owner.made in s.parents)
            calls = [(owner.made, file)]
        else:
            if any(row.get("dest") == key for row in self._job.options):  # HfArgumentParser makes it
                return [self._of_option(key)]
            uses = any(s.uses[owner.node.name] for s in self._sources.values())
            calls = [(call, f) for call, f, _ in self._calls(owner.node, owner.file)] if uses else []
        ways: list[At | Change] = []
        for call, file in calls:
            argument = next((k.value for k in call.keywords if k.arg == key), None)
            unpacked = [k.value for k in call.keywords if k.arg is None]
            place = fields.index(key) if key in fields else len(call.args)
            if argument is None and (any(isinstance(a, ast.Starred) for a in call.args) or len(unpacked) > 1):
                raise NotEditable(f"{key} may be among the arguments of `*` or `**`")
            if argument is None and place < len(call.args):
                argument = call.args[place]
            if argument is None and unpacked:
                source = self._owner(At(unpacked[0], file))
                if source is None or source.kind != "keys":
                    raise NotEditable(f"{key} may be among the arguments of `**`")
                if in_configuration(self._job, (*source.path, key), None):
                    ways.append(self._of_key((*source.path, key), None))
                    continue
            ways.append(At(argument, file))  # type: ignore[arg-type]
        return ways

    def _class(self, name: str) -> tuple[str, ast.ClassDef] | None:
        found = [(file, one) for file, source in self._sources.items() for one in source.defined[name]]
        return found[0] if len(found) == 1 and isinstance(found[0][1], ast.ClassDef) else None

    def _imported(self, name: str, at: At) -> str | None:
        """Return the file of the module of the script's that a name is of."""
        bound = self._source(at.file).bound(self._source(at.file).tree, name)
        if len(bound) != 1 or not isinstance(bound[0], ast.alias):
            return None
        statement, alias = self._source(at.file).parents[bound[0]], bound[0]
        try:
            if isinstance(statement, ast.ImportFrom):
                inner = ".".join(filter(None, (statement.module, alias.name)))
                return self._module(inner, statement.level, at.file)
            return self._module(alias.name, 0, at.file) if alias.asname or "." not in alias.name else None
        except NotEditable:
            return None

    @staticmethod
    def _is_hydra(name: str, scope: tuple[ast.AST, ...]) -> bool:
        """Return whether a name is the configuration that Hydra gives a function."""
        function = scope[-1] if scope else None
        if not isinstance(function, _Function) or not function.args.args or function.args.args[0].arg != name:
            return False
        return any(isinstance(d, ast.Call) and ast.unparse(d.func) == "hydra.main" for d in function.decorator_list)

    # -- sources

    @cached_property
    def _sources(self) -> Mapping[str, Source]:
        """The sources of the script, all of which must be as they were."""
        found = {}
        for file in self._job.files:
            if file.endswith(".py"):
                try:
                    found[file] = source_of(self._job.read(file))
                except NotEditable as e:
                    raise NotEditable(f"{file}: {e}") from None
        return found

    def _source(self, file: str) -> Source:
        if file not in self._sources:
            raise NotEditable(f"{file} is not among the files that were recorded")
        return self._sources[file]


def _check_tree(source: Source, node: ast.expr, new: bytes, after: bytes) -> None:
    """Raise NotEditable where a text has another tree than the source's with a new literal."""
    wanted = deepcopy(source.tree)
    place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
    for one in ast.walk(wanted):
        for name, value in ast.iter_fields(one):
            for n, each in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(each, ast.expr) and is_literal(each) and _place(each) == place:
                    by = ast.parse(new, mode="eval").body
                    value.__setitem__(n, by) if isinstance(value, list) else setattr(one, name, by)
    try:
        same = ast.dump(ast.parse(after)) == ast.dump(wanted)
    except SyntaxError:
        same = False
    if not same:
        raise NotEditable("the value is written in a way that is not edited")


def _place(node: ast.expr) -> tuple[int, int, int | None, int | None]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _member(node: ast.expr) -> tuple[ast.expr, str, ast.expr | None] | None:
    """Return object, name and default of what reads an attribute or key: o.k, o["k"], o.get("k", d), getattr(o, "k")."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr, None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.value, node.slice.value, None
    if isinstance(node, ast.Call) and not node.keywords and node.args:
        is_get = isinstance(node.func, ast.Attribute) and node.func.attr == "get"
        args = [node.func.value, *node.args] if is_get else node.args if last_word(node.func) == "getattr" else []  # type: ignore[attr-defined]
        if len(args) in (2, 3) and isinstance(args[1], ast.Constant) and isinstance(args[1].value, str):
            return args[0], args[1].value, args[2] if len(args) == 3 else None
    return None


def _texts(call: ast.Call) -> list[str]:
    return [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]


def _dest(call: ast.Call) -> str:
    """Return the name of the value of an option that argparse or click is given; "": not known."""
    dest = next((keyword.value for keyword in call.keywords if keyword.arg == "dest"), None)
    if dest is not None:
        return str(dest.value) if isinstance(dest, ast.Constant) else ""
    names = [text for arg in _texts(call) for text in arg.split("/")[:1]]
    plain = [name for name in names if name.isidentifier()] if last_word(call.func) == "option" else []
    long = [name for name in names if name.startswith("--")]
    first = (plain or long or names or [""])[0]
    return first.lstrip("-").replace("-", "_")


def _id(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _is_data(cls: ast.ClassDef) -> bool:
    made = [d.func if isinstance(d, ast.Call) else d for d in cls.decorator_list]
    return any(last_word(one) in ("dataclass", "define", "attrs") for one in made)


def _default(node: ast.expr) -> ast.expr:
    """Return the default of a field: of `field(default=0)` what it names."""
    if isinstance(node, ast.Call) and last_word(node.func) in ("field", "Field", "HfArg"):
        given = [keyword.value for keyword in node.keywords if keyword.arg == "default"]
        return given[0] if given else node.args[0] if node.args else node
    return node


def _parameter_default(function: Any, name: str) -> ast.expr | None:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)
    pairs = [*with_default, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return next((value for one, value in pairs if one.arg == name), None)


def _argument(function: Any, call: ast.Call, name: str, shift: int) -> ast.expr | None:
    """Return the argument of a call for a parameter; None: it has none."""
    given = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if given is not None:
        return given
    if any(keyword.arg is None for keyword in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args):
        raise NotEditable(f"{name} may be among the arguments of `*` or `**`")
    positional = [one.arg for one in (*function.args.posonlyargs, *function.args.args)][shift:]
    place = positional.index(name) if name in positional else len(call.args)
    return call.args[place] if place < len(call.args) else None


def _spawned(call: ast.Call) -> ast.Call:
    """Return the call that torch.multiprocessing's `spawn(f, args=(…))` makes, with the rank first."""
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "args"), None)
    given = given or (call.args[1] if len(call.args) > 1 else None)
    if not isinstance(given, ast.Tuple):
        raise NotEditable("the arguments of `spawn` are not written there")
    return ast.Call(call.func, [ast.Constant(None), *given.elts], [])
