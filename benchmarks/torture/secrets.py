"""How secrets get on a command line, into the environment and into source, and whether a recording keeps one.

One real recording of a tiny script has hundreds of them, each with a secret of its own: in its arguments, in the bodies
of `bash -c` and `python -c` that start it, in its environment, in what it overrides and in its source. Then every file
of the recording, its page, result.json and its exports are searched, unpacked, for each.

    python -m benchmarks.torture.secrets --seed 1 --shapes 300
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import zlib
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

S = "{S}"  # where the secret stands


@dataclass(frozen=True)
class Shape:
    """Words of a command with a secret. `named`: that it is one follows from its name or its place in a URL."""

    words: tuple[str, ...]
    named: bool

    def filled(self, secret: str) -> list[str]:
        """Return the words with the secret."""
        return [word.replace(S, secret) for word in self.words]


# Hidden with --keep-arguments too. A line is a command as a shell reads it.
NAMED = r"""
--password {S}
--password={S}
--api-key {S}
--api_key={S}
--apikey {S}
-api-key={S}
--db-password {S}
--aws-secret-access-key {S}
--awsSecretAccessKey={S}
--hf_token {S}
--wandb.api_key {S}
--client.secret={S}
--auth {S}
--pwd {S}
--passphrase 'two words {S}'
--jwt {S}
--credentials {S}
--cookie 'sid={S}; path=/'
--password -{S}
--password --{S}
--token=-{S}
--token -x={S}
--secret 'a b {S}'
--secret 'a "b" {S}'
--secret a=b={S}
--secret=a=b={S}
--secret=a,{S}
--secret x:{S}
--secret {S}==
--secret 'a
{S}'
HF_TOKEN={S}
WANDB_API_KEY={S}
token={S}
wandb.api_key={S}
+wandb.api_key={S}
++auth.token={S}
a=1,api_key={S}
--set a=1,api_key={S}
--set=a=1,api_key={S}
--options 'lr=0.1 password={S}'
--options 'lr=0.1;password={S}'
--config '{"api_key": "{S}"}'
--config '{"lr": 0.1, "auth": {"token": "{S}"}}'
--config='{"secret":"{S}"}'
--config '{\"api_key\": \"{S}\"}'
--config "{'api_key': '{S}'}"
--config "{'password': 'a b, {S}'}"
--config "dict(api_key='{S}')"
--config '[("token", "{S}")]'
--config '{api_key: {S}}'
--config 'api_key = "{S}"'
--config 'a: 1
api_key: {S}'
--words '["--password", "{S}"]'
'{"password": "{S}"}'
--url https://user:{S}@host/x
--url https://{S}@host/x
--url https://user:a@{S}@host/x
--url https://user:a/{S}@host/x
--url 'https://user:a"{S}@host/x'
--url "https://user:it's{S}@host/x"
--url=https://user:{S}@host
https://user:{S}@host
postgres://user:{S}@host/db?x=1
redis://:{S}@host:6379/0
--dsn user:{S}@host/db
--mirrors 'http://a:b@c http://d:{S}@e'
--url https://host/?token={S}
--url 'https://host/p?token={S}&x=1'
--url 'https://host/p?x=1&sig={S}'
--url https://host/p#access_token={S}
--url host/p?token={S}
--url https://host?X-Amz-Signature={S}
--url=https://host?q={S}
--header 'Authorization: Bearer {S}'
--header 'Authorization: Basic {S}'
--header 'Authorization: token {S}'
--header 'X-Api-Key: {S}'
--header=Authorization:{S}
-H 'Cookie: a={S}'
--header 'Bearer {S}'
--before 'login --password {S} && true'
--before 'export API_KEY={S}; true'
--before "os.environ['API_KEY'] = '{S}'"
--before 'login(token="{S}")'
-e API_KEY={S}
--env=API_KEY={S}
"""

# Hidden where arguments are not kept.
OTHER = r"""
{S}
--note {S}
--note={S}
--note 'a b {S}'
--note -{S}
--note 'true {S}'
--run-name={S}
-p {S}
-p{S}
-p={S}
-DNOTE={S}
-{S}
--user me:{S}
--data /mnt/{S}
--data s3://bucket/{S}
--data {S}.tar
--webhook https://hooks.host/services/T0/{S}
--webhook=https://hooks.host/services/{S}
--seed {S}
--tags a,{S}
--lr 0.1 {S}
--betas 0.9,{S}
--precision bf16-{S}
--device cuda:{S}
--pair key {S}
--kv note={S}
--kv lr=0.1,note={S}
-e NOTE={S}
--env=NOTE={S}
note={S}
optimizer={S}
+experiment={S}
NOTE={S}
{S}=1
{S}==
{S}=
={S}
@{S}
'({S})'
'$(cat {S})'
"login('{S}')"
--body "f('{S}')"
--items "['{S}']"
--пароль {S}
--note 'ключ {S}'
--note '
{S}'
-c {S}
-m {S}
--config.py={S}
--config {S}/a
--note 'x.py {S}'
'train.py {S}'
'/bin/login {S} x.py'
--{S}={S}
--note '"; thread (0): {S}'
"""


def shapes(text: str, *, named: bool) -> list[Shape]:
    """Return the shapes of a table; a quoted word may go on in the next line."""
    found, line = list[Shape](), ""
    for part in text.strip().split("\n"):
        line = f"{line}\n{part}" if line else part
        try:
            words = shlex.split(line)
        except ValueError:
            continue
        found.append(Shape(tuple(words), named))
        line = ""
    return found


SHAPES = (*shapes(NAMED, named=True), *shapes(OTHER, named=False))

_SECRET_NAMES = "password api_key token secret auth passwd db-password HF_TOKEN clientSecret credentials private-key"
_PLAIN_NAMES = "note name data url run-id tag comment model config user host path prompt endpoint"
_AROUND = (
    "{}",
    "{}=",
    "-{}",
    "a@{}",
    "a/{}",
    'a"{}',
    "it's{}",
    "a,{}",
    "a b {}",
    "a:{}",
    "a={}",
    "a&{}",
    "{}\n",
    "é{}",
)
_NESTED = (
    "{v}",
    "{n}={v}",
    "{n}: {v}",
    'x=1,{n}="{v}"',
    '{{"lr": 1, "{n}": "{v}"}}',
    "{{'a': {{'{n}': '{v}'}}}}",
    "f(x=1, {n}='{v}')",
    "https://host/p?{n}={v}",
    "https://host/p?a=1&{n}={v}",
    "https://me:{v}@host/p",
    "run --{n} {v}",
)


def random_shape(dice: random.Random) -> Shape:
    """Return a shape that no table has: a name, how it is given, what nests it, and what the secret looks like."""
    named = dice.random() < 0.5
    name = dice.choice((_SECRET_NAMES if named else _PLAIN_NAMES).split())
    value = dice.choice(_AROUND).format(S)
    nested = dice.choice(_NESTED)
    text = nested.replace("{{", "\0").replace("}}", "\1").replace("{n}", name).replace("{v}", value)
    text = text.replace("\0", "{").replace("\1", "}")
    outer = dice.choice(_PLAIN_NAMES.split())
    given = dice.choice((f"--{outer}={text}", text, f"--{outer}\0{text}", f"-x\0{text}", f"--{name}\0{text}"))
    return Shape(tuple(given.split("\0")), named and (nested != "{v}" or given.startswith(f"--{name}\0")))


def secret(dice: random.Random, number: int) -> str:
    """Return a secret that nothing else holds, and that no rule can know by its look."""
    return f"{dice.choice('kqxz')}{dice.randrange(10**4):04}Q{number:04}{dice.choice('jvw')}"


SCRIPT = '''
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
api_key = "{0}"  # {1}
def login(*words, **named): return {{}}
class Rows(TensorDataset):
    def __getitem__(self, at):
        time.sleep(0.002)
        return super().__getitem__(at)
data = Rows(torch.ones(64, 8))
model = torch.nn.Linear(8, 1)
note = login(password="{2}", pin={7})
loader = DataLoader(login("{3}") or data, batch_size=8, num_workers=0)
""" {4}
{5} """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **login('{6}', f"{{login("{8}")}}" if 0 else b"{9}"))
def step(batch):
    note = ["{10}", r"\\{11}"]  # {12}
    loss = model(batch[0], **login(token="{13}")).sum()
    loss.backward(**login("""{14}
        {15}"""))
    optimizer.step(**login({{"api_key": "{16}"}}))
until = time.monotonic() + 4
while time.monotonic() < until:
    for batch in list(login("{17}")) or loader:
        step(batch)
'''
IN_SOURCE = 18


@dataclass
class Planted:
    """A recorded job and the secrets that it was given: secret → where it was."""

    run: Path
    secrets: dict[str, str]


def plant(folder: Path, chosen: Sequence[Shape], dice: random.Random, *options: str) -> Planted:
    """Record a job that has a secret in every place, and make of the recording all that can be made.

    Raises RuntimeError where the job, the recording or an export fails.
    """
    planted: dict[str, str] = {}

    def new(where: str) -> str:
        made = secret(dice, len(planted))
        planted[made] = where
        return made

    numbered = [new("in its source") for _ in range(IN_SOURCE)]
    pin = str(10**8 + dice.randrange(10**8))
    planted[pin] = "a number in its source"
    numbered[7] = pin
    script = folder / "train.py"
    text = SCRIPT if sys.version_info >= (3, 12) else SCRIPT.replace('f"{{login("{8}")}}"', "f\"{{login('{8}')}}\"")
    script.write_text(text.format(*numbered))
    arguments = [word for shape in chosen for word in shape.filled(new(repr(shape.words)))]
    body = (
        f"import runpy, sys\nlogin = '{new('python -c')}'\n"
        f"sys.argv[0] = {str(script)!r}\nrunpy.run_path({str(script)!r}, run_name='__main__')"
    )
    shell = f"API_KEY={new('bash -c')} NOTE={new('bash -c')} exec {shlex.quote(sys.executable)} -c {shlex.quote(body)}"
    command = ["env", f"API_KEY={new('env')}", f"NOTE={new('env')}", "bash", "-c", f'{shell} "$@"', "bash"]
    command += ["--lr", "0.125", "--optimizer", "adamw", "--precision=bf16", *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DLPROF_")}
    env |= {name: new("environment") for name in ("WANDB_API_KEY", "HF_TOKEN", "NCCL_PSK", "MY_NOTE")}
    env |= {"NCCL_TOPO_FILE": f"https://me:{new('URL in the environment')}@host/x", "NCCL_ALGO": "Ring"}
    env |= {"NCCL_NET_PLUGIN": f"https://host/x?token={new('URL in the environment')}", "OMP_NUM_THREADS": "1"}
    run = folder / "run"
    overridden = [f"--set=env.{name}={new('--set')}" for name in ("SOME_TOKEN", "SOME_NOTE")]
    dlprof = [sys.executable, "-m", "dlprof"]
    # At a rate at which bursts of py-spy see every process within the job's few seconds.
    wrap = ["wrap", "-o", str(run), "--no-report", "--stacks", "50", *overridden, *options, "--", *command]
    _run([*dlprof, *wrap], folder, env)
    _run([*dlprof, "report", str(run), "--quiet"], folder, env)
    made = run / "made"
    made.mkdir()
    tables = ["--perfetto", "made/a.json.gz", "--csv", "made/csv", "--quiet"]
    if any(run.glob("hosts/*/stacks.jsonl")):  # where py-spy may look
        tables += ["--speedscope", "made/b.json"]
    _run([*dlprof, "export", str(run), *tables], run, env)
    (made / "compared.txt").write_text(_run([*dlprof, "compare", str(run), str(run)], made, env))
    return Planted(run, planted)


def _run(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def unpacked(data: bytes) -> bytes:
    """Return data with all that is packed in it, wherever it begins, behind it."""
    found = [data]
    for magic, bits in ((b"\x1f\x8b\x08", 31), (b"\x78\x01", 15), (b"\x78\x9c", 15), (b"\x78\xda", 15)):
        at = data.find(magic)
        while at >= 0:
            with suppress(zlib.error):
                found.append(zlib.decompressobj(bits).decompress(data[at:]))
            at = data.find(magic, at + 1)
    return b"\n".join(found)


def held(folder: Path) -> dict[str, bytes]:
    """Return what each file below a folder holds, unpacked, and its name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        (name := str(path.relative_to(folder))): name.encode(errors="replace") + _whole(path.read_bytes())
        for path in files
    }


def _whole(data: bytes) -> bytes:
    """Return data unpacked, and what is packed in lines of JSON."""
    packed = (b64decode(text) for text in re.findall(rb'"gzip":"([A-Za-z0-9+/=]*)"', data))
    return b"\n".join([unpacked(data), *map(unpacked, packed)])


def leaks(files: Mapping[str, bytes], secrets: Iterable[str]) -> dict[str, list[str]]:
    """Return the secrets that are in some file, each with the files."""
    found = {s: [name for name, data in files.items() if s.encode() in data] for s in secrets}
    return {s: names for s, names in found.items() if names}


def main() -> int:
    """Record one job with all shapes and as many random ones, search it, and print what leaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", type=int, default=300, help="random ones, beside the table's (default: 300)")
    asked = parser.parse_args()
    dice = random.Random(asked.seed)
    drawn = [*SHAPES, *(random_shape(dice) for _ in range(asked.shapes))]
    bad = 0
    for options in ((), ("--keep-arguments",)):
        chosen = [shape for shape in drawn if shape.named or not options]
        with tempfile.TemporaryDirectory() as folder:
            planted = plant(Path(folder), chosen, dice, *options)
            found = leaks(held(planted.run), promised(planted, keep=bool(options)))
        bad += len(found)
        print(f"{' '.join(options) or 'by default'}: {len(planted.secrets)} secrets, {len(found)} leak")
        for one, names in found.items():
            print(f"  {planted.secrets[one]}: {json.dumps(names)}")
    return 1 if bad else 0


def promised(planted: Planted, *, keep: bool) -> list[str]:
    """Return the secrets that must not leak; `keep`: those under harmless names in what starts the job may."""
    return [s for s, where in planted.secrets.items() if not (keep and where in ("env", "bash -c", "python -c"))]


if __name__ == "__main__":
    sys.exit(main())
