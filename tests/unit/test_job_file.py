"""The job file: every mistake is one sentence that names the file and the key."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from conftest import ROOT

from accept_mpi.errors import UserError, one_line
from accept_mpi.job import Job
from accept_mpi.job_file import parse, read_text
from accept_mpi.launch.run_identity import RunIdentity
from accept_mpi.registry import call, find_function

GOOD = """
[model]
name = "cnn"
[data]
name = "digits"
[train]
steps = 3
[output]
directory = "run"
"""


def test_defaults_and_json() -> None:
    job = parse(GOOD, "job.toml")
    assert job.train.batch_size == 64
    assert job.pipeline.schedule == "1f1b"
    assert Job.from_json(job.to_json()) == job


def test_shipped_jobs_parse() -> None:
    jobs = [path for path in sorted((ROOT / "jobs").rglob("*.toml")) if "\n[model]\n" in f"\n{path.read_text()}"]
    assert len(jobs) >= 10  # besides fleets and sweeps
    for path in jobs:
        parse(path.read_text(), str(path))


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        ("steps = 3\nlr = 0.5", "train.optimizer.lr=0.01", (3, None, 0.01)),
        ("steps = 3\noptimizer = { lr = 0.5 }", "train.lr=0.01", (3, None, 0.01)),
        ("steps = 3\nlr = 0.5", "train.optimizer={lr=0.01}", (3, None, 0.01)),
        ("steps = 3\nlr = 0.5", "train.optimizer.momentum=0.9", (3, None, 0.5)),
        ("epochs = 2", "train.steps=3", (3, None, 0.05)),
        ("steps = 3", "train.epochs=2", (None, 2, 0.05)),
    ],
)
def test_an_override_drops_the_key_that_says_the_same(text: str, override: str, expected: tuple) -> None:
    job = parse(GOOD.replace("steps = 3", text), "job.toml", [override])
    assert (job.train.steps, job.train.epochs, job.lr) == expected


def test_what_is_taken_out_is_a_key() -> None:
    """A misspelt key in --set KEY=null left the key itself in the job, without a word."""
    text = GOOD.replace("steps = 3", "steps = 3\nclip_norm = 1.0\nclip_nom = 2.0")
    with pytest.raises(
        UserError, match=r'--set train\.clipnorm=null: unknown key "train\.clipnorm"; did you mean "clip_norm"'
    ):
        parse(GOOD, "job.toml", ["train.clipnorm=null"])
    assert parse(text, "job.toml", ["train.clip_nom=null"]).train.clip_norm == 1.0  # a mistake of the file's
    free = ["train.clip_nom=null", "train.clip_norm=null", "train.lora.rank=null", "model.args.width=null"]
    job = parse(text, "job.toml", free)
    assert job.train.clip_norm is None
    assert job.train.lora is None


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("steps = 3\nepochs = 2", [], "train: give either epochs or steps"),
        ("steps = 3", ["train.steps=3", "train.epochs=2"], "train: give either epochs or steps"),
        ("steps = 3\nlr = 0.1\noptimizer.lr = 0.2", [], "train: give either lr or optimizer.lr"),
        ("steps = 3", ["train.lr=0.1", "train.optimizer.lr=0.2"], "train: give either lr or optimizer.lr"),
    ],
)
def test_two_keys_that_say_the_same(text: str, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(GOOD.replace("steps = 3", text), "job.toml", overrides)


def test_overrides() -> None:
    job = parse(GOOD, "job.toml", ["train.lr=0.01", "pipeline.cuts=[2,4]", "pipeline.schedule=gpipe", "model.args.width=8"])
    assert job.lr == 0.01
    assert job.pipeline.cuts == [2, 4]
    assert job.pipeline.schedule == "gpipe"
    assert job.model.args == {"width": 8}
    assert parse(GOOD, "j", ["pipeline.cuts=even"]).pipeline.cuts == "even"


@pytest.mark.parametrize("text", ["2026-11-30", "2026-02-30", "20261130", "12:30:00", "1e5", "true", "007", "a b"])
def test_overrides_of_texts_that_look_like_something_else(text: str) -> None:
    """A shell takes quotes away, so that a folder called like a date was refused."""
    assert parse(GOOD, "j", [f"output.directory={text}"]).output.directory == text
    assert parse(GOOD, "j", [f"output.directory='{text}'"]).output.directory == text
    assert parse(GOOD, "j", ["model.output=1", "train.lr=1"]).model.output == "1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.epoch=3"], 'job.toml: unknown key "train.epoch"; did you mean "epochs"?'),
        (["trian.steps=3"], 'job.toml: unknown key "trian"; did you mean "train"?'),
        (["train.optimizer.momentun=0.9"], 'unknown key "train.optimizer.momentun"; did you mean "momentum"?'),
        (["train.steps=ten"], 'job.toml: train.steps: expected a whole number >= 1, got "ten"'),
        (["train.batch_size=0"], "train.batch_size: expected a whole number >= 1 and <= 16777216, got 0"),
        (["train.optimizer.lr=-1"], "train.optimizer.lr: expected a number > 0, got -1"),
        (
            ["pipeline.schedule=2f2b"],
            'expected one of "gpipe", "1f1b", "1f1b-async", "1f1b-delayed", "zero-bubble", got "2f2b"',
        ),
        (["train.micro_batches=100"], "a micro-batch needs at least one sample"),
        (["pipeline.lanes=F+B", "pipeline.recompute=on"], 'does not go with lanes = "F+B"'),
        (["pipeline.lanes=F+B", "pipeline.schedule=1f1b-async"], 'F+B" goes with synchronous schedules'),
        (["pipeline.lanes=0"], "pipeline.lanes"),
        (["pipeline.speeds=[1.0, 2.0]"], 'pipeline.speeds goes with given cuts; cuts = "auto" measures the speeds'),
        (["train.lora={targets=[]}"], "train.lora.targets: expected a list of texts, not empty, got []"),
        (["train.groups=[{names=[]}]"], "train.groups[0].names: expected a list of texts, not empty, got []"),
        (["pipeline.vertical_sync=true"], 'goes with schedule = "1f1b-async" only'),
        (["pipeline.cuts=odd"], 'pipeline.cuts: expected "auto" or "even" or a list of whole numbers >= 1, got "odd"'),
        (["train.lr=fast"], 'job.toml: train.lr: expected a number > 0, got "fast"'),
        (["train.lr=nan"], "train.lr: expected a finite number, got nan"),
        (["train.lr=inf"], "train.lr: expected a finite number, got inf"),
        (["pipeline.timeout=inf"], "pipeline.timeout: expected a finite number, got inf"),
        (["train.seed=99999999999999999999"], "train.seed: expected a number of at most 64 bits"),
        (["train.optimizer={name='adam', betas=[0.9, nan]}"], "betas[1]: expected a finite number, got nan"),
        (
            ["train.optimizer.correction=extrapolate"],
            'correction goes with schedule = "1f1b-delayed" or "1f1b-async": in 1f1b no gradient is older than the weights',
        ),
        (
            ["pipeline.lanes=F+B", "pipeline.schedule=1f1b-delayed"],
            "in 1f1b-delayed a backward needs the weights of its forward",
        ),
        (["train.optimizer.betas=[0.9]"], "train.optimizer.betas: expected a list of 2 numbers, got [0.9]"),
        (["model=cnn"], 'model: expected a table, got "cnn"'),
        (["train.drop_last=1"], "train.drop_last: expected true or false, got 1"),
        (["pipeline.ranks=3"], "expected a list of whole numbers >= 0 or lists of whole numbers >= 0, not empty, got 3"),
        (["pipeline.forward=3"], "pipeline.forward: expected a text or a list of texts, got 3"),
        (["pipeline.adapt=x"], 'pipeline.adapt: expected true or false or a whole number >= 1, got "x"'),
        (["train.threads=100000"], 'expected a whole number >= 1 and <= 1024 or "auto", got 100000'),
        (["lr=0.1"], 'unknown key "lr"; did you mean "train.lr"?'),
        (["train.momentum=0.9"], 'unknown key "train.momentum"; did you mean "train.optimizer.momentum"?'),
        (["epoch=3"], 'unknown key "epoch"; did you mean "train.epochs"?'),
        (["train.optimizer.nesterov=true"], "train.optimizer.nesterov = true needs a momentum"),
        (["train.optimizer={name='adam', momentum=0.9}"], 'momentum goes with name = "sgd" only; leave it out for "adam"'),
        (
            ["train.optimizer.betas=[0.9, 0.99]"],
            'betas goes with name = "adam" or "adamw" or "nadam" or "lion" or "muon"',
        ),
        (["train.optimizer.final_lr=0.1"], 'final_lr goes with schedule = "cosine" only; leave it out for "constant"'),
        (["train.optimizer.decay=0.5"], 'decay goes with schedule = "step" only'),
        (["pipeline.cuts=[0,2]"], "pipeline.cuts"),
        (["train.lora={targets=['a'], rank=0}"], "train.lora.rank: expected a whole number >= 1 and <= 4096, got 0"),
        (["train.lora={targets='a'}"], 'train.lora.targets: expected a list of texts, not empty, got "a"'),
        (["train.lora={targets=['']}"], 'train.lora.targets[0]: expected a text, not empty, got ""'),
        (["train.lora={rank=3}"], 'missing key "train.lora.targets"'),
        (["train.lora=5"], "train.lora: expected a table, got 5"),
        (["train.lora={targets=['a'], rnk=3}"], 'unknown key "train.lora.rnk"; did you mean "rank"?'),
        (["train.mix={classes='a'}"], 'train.mix.classes: expected a whole number >= 1, got "a"'),
        (["train.mix={classes=3}"], "train.mix mixes nothing: give it mixup or cutmix, e.g. mixup = 0.2"),
        (["train.mix={classes=3, mixup=-1}"], "train.mix.mixup: expected a number >= 0 and <= 1000000.0, got -1"),
        (["train.mix={classes=3, cutmx=1}"], 'unknown key "train.mix.cutmx"; did you mean "cutmix"?'),
        (["train.groups=[{names=['a'], lr=-1}]"], "train.groups[0].lr: expected a number >= 0 and <= 1e+30, got -1"),
        (["train.groups=[{name=['a']}]"], 'unknown key "train.groups[0].name"; did you mean "names"?'),
        (["train.groups=3"], "train.groups: expected a list of tables, got 3"),
        (
            ["train.device=gpu"],
            'train.device: expected "cpu" or "auto" or "cuda" or "cuda:1" or a table of such',
        ),
        (["train.device={'a*'='gpu'}"], 'a table of such, got {"a*": "gpu"}'),
        (["model.blocks=3"], "model.blocks: expected a text or a list of texts, got 3"),
        (["lr"], 'expected "section.key=value"'),
        (["model.name.x=1"], '"name" is not a table'),
    ],
)
def test_mistakes_are_sentences(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(GOOD, "job.toml", overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_key_and_bad_toml() -> None:
    with pytest.raises(UserError, match=r'job.toml: missing key "model"'):
        parse(GOOD.replace('[model]\nname = "cnn"', ""), "job.toml")
    with pytest.raises(UserError, match=r'job.toml: missing key "data.name"'):
        parse(GOOD.replace('name = "digits"', ""), "job.toml")
    with pytest.raises(UserError, match=r"job.toml: not valid TOML: .*line 2"):
        parse("[model]\nname = \n", "job.toml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=" + "9" * 5000, "Exceeds the limit"),
        ("train.steps=0x" + "f" * 9999, "expected a number of at most 64 bits, got one of 39996"),
        ("pipeline.ranks=[0, 99999999999999999999]", "pipeline.ranks[1]: expected a number of at most 64 bits"),
        ("model.args=" + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("model.args.a=" + "{a=" * 40 + "1" + "}" * 40, "nested more than 32 deep"),
        ("model.args." + "a." * 5000 + "a=1", "nested more than 32 deep"),
        ("model.args.a=nan", "model.args.a: expected a finite number, got nan"),
        ("data.args.a=[{b=inf}]", "data.args.a[0].b: expected a finite number, got inf"),
        ("model.args.a=1979-05-27", "got the date or time 1979-05-27"),
        ('output.directory="a\\u0000b"', r'without control characters such as U+0000, got "a\x00b"'),
        ('model.name="net\\u001b[31m:model"', r'got "net\x1b[31m:model"'),
        ("output.directory=r\udcff", r'output.directory: expected a text in UTF-8, got "r\udcff"'),
        ('output.directory=""', "output.directory: expected a directory"),
        ('output.directory="  "', 'output.directory: expected a directory, such as "runs/first", got "  "'),
        ("train.batch_size=999999999999999999", "train.batch_size: expected a whole number >= 1 and <= 16777216"),
        (f"pipeline.cuts={list(range(1, 5000))}", "pipeline.cuts: 4999 entries; at most 4096"),
        ("pipeline.ranks=[-1]", "a whole number >= 0 or a list of whole numbers >= 0, not empty, got -1"),
        ("pipeline.ranks=[[]]", "a whole number >= 0 or a list of whole numbers >= 0, not empty, got []"),
        ("train.seed=1\nx = 5", "expected one value"),
        ("..=3", 'expected "section.key=value"'),
        ("train..lr=3", 'expected "section.key=value"'),
    ],
    ids=lambda text: text[:20],
)
def test_hostile_values_are_sentences(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(GOOD, "job.toml", [override])
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2100


def test_what_is_large_and_means_something() -> None:
    changes = [
        "pipeline.timeout=1e300",
        "pipeline.startup_timeout=1e300",
        "train.lr=1e308",
        "output.keep=999999999999999999",
    ]
    job = parse(GOOD, "job.toml", [*changes, "train.steps=999999999999999999"])
    assert job.pipeline.timeout * 1000 < 2**31
    assert job.lr == 1e30
    assert Job.from_json(job.to_json()) == job


def test_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert parse(GOOD, "job.toml", ["output.directory=~/x"]).output.directory == "/home/me/x"
    assert parse(GOOD, "job.toml", ["output.directory=a/~x"]).output.directory == "a/~x"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_byte_order_marks_and_line_ends(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(GOOD.replace("run", "rün").replace("\n", "\r\n").encode(encoding))
    assert parse(read_text(path), "job.toml").output.directory == "rün"


def test_what_is_no_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    for data, message in (
        (GOOD.encode("utf-16"), "it is UTF-16; save it as UTF-8"),
        (GOOD.encode("utf-32"), "it is UTF-32; save it as UTF-8"),
        (GOOD.replace("run", "rün").encode("latin-1"), r"byte \d+ \(0xfc\) is not UTF-8"),
        (b"#" * (1 << 20) + b"#", "more than the 1048576 that it may have"),
    ):
        path.write_bytes(data)
        with pytest.raises(UserError, match=message):
            read_text(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="a device or a pipe, not a file"):
        read_text(path)
    for other, message in (("/dev/zero", "a device or a pipe"), (tmp_path, "a directory"), ("a\0b", "embedded null")):
        with pytest.raises(UserError, match=message):
            read_text(Path(other))


@pytest.mark.parametrize("name", [":model", "..net:model", "net:model:x", "net\0:model", "net:", ":", "a..b:c", "net:a.b"])
def test_names_that_no_function_has(name: str) -> None:
    with pytest.raises(UserError, match=r'model.name: expected "package.module:function", got') as caught:
        find_function(name, {}, "model.name")
    assert str(caught.value).isprintable()


def test_a_users_function_that_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends() -> None:
        raise SystemExit("bye")

    def colours() -> None:
        raise RuntimeError("two\nlines of \x1b[31mred\x1b[0m")

    with pytest.raises(UserError, match="failed: SystemExit: bye"):
        call(ends, {}, "data.args", 0)
    with pytest.raises(UserError) as caught:
        call(colours, {}, "data.args", 0)
    assert str(caught.value).endswith(r"RuntimeError: two lines of \x1b[31mred\x1b[0m")
    (tmp_path / "ends_when_imported.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match='cannot import "ends_when_imported": SystemExit: 3'):
        find_function("ends_when_imported:model", {}, "model.name")


def test_one_line() -> None:
    assert one_line("plain  text, größer") == "plain  text, größer"
    assert one_line(" a \r\n b\tc\u202e\udcff") == r"a b\tc\u202e\udcff"
    assert one_line("x" * 5000, 100) == "x" * 50 + " ... " + "x" * 50


@pytest.mark.parametrize("text", ["../1", "a/b/1", "a", "x\n/1", "a/-1", "/1", "a/1/x", "a/1/1,", "a/1/2/3"])
def test_names_of_runs_lead_nowhere_else(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME/NUMBER"):
        RunIdentity.parse(text)


_PIECES = (
    "nan", "1e400", "9" * 30, "-1", "0", "true", "[]", "{}", '""', '"\\u0000"', "1979-05-27", "07:32:00", "[[[[1]]]]",
    '"a:b:c"', '"auto"', '[1, "a"]', "{a = {b = 3}}", "[-1]", "[true]", "[{}]", '{name = "adam", betas = [1, 2, 3]}',
    "{lr = -1}", "\x00",
)  # fmt: skip


def test_every_key_of_a_wrong_type_is_a_sentence() -> None:
    def keys(table: type, before: str) -> Iterator[tuple[str, str]]:
        """Each key, and a value that it is given within tables that may be left out."""
        for field in msgspec.structs.fields(table):
            for kind in get_args(field.type) or (field.type,):
                if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                    yield from keys(kind, f"{before}{field.name}.")
            yield f"{before}{field.name}", field.name

    for key, name in keys(Job, ""):
        for value in ("-1e9", "[[]]", "{strange = 1}", '["", -1]', "1979-05-27"):
            try:
                parse(GOOD, "job.toml", [f"{key}={value}"])
            except UserError as mistake:
                said = str(mistake)
            else:
                said = name
            assert name in said, (key, value)


def test_a_mangled_job_is_a_job_or_a_sentence(tmp_path: Path) -> None:
    path, ends = tmp_path / "job.toml", set()
    for seed in range(300):
        draw = random.Random(seed)
        more = "batch_size = 8\noptimizer = { lr = 0.1 }\n[pipeline]\ncuts = [1]\n[output]"
        lines = GOOD.replace("[output]", more).splitlines()
        for _ in range(draw.randrange(3)):
            place = draw.randrange(len(lines))
            lines[place] = f"{lines[place].split('=')[0]} = {draw.choice(_PIECES)}"
        data = bytearray("\n".join(lines).encode())
        for _ in range(draw.randrange(3)):
            place = draw.randrange(len(data))
            data[place : place + draw.randrange(9)] = draw.randbytes(draw.randrange(4))
        path.write_bytes(data)
        try:
            job = parse(read_text(path), "job.toml")
        except UserError as mistake:
            said = str(mistake)
        else:
            said = ""
            assert Job.from_json(job.to_json()) == job
        assert said.isprintable(), seed
        assert len(said) < 2100, seed
        ends.add(bool(said))
    assert ends == {True, False}
