"""The benchmark's rows and CSV files."""

import json

import pytest

from benchmark import models, records
from benchmark.records import LigerRow, Row
from tests.benchmark_support import GPU, row


def test_a_csv_file_keeps_rows_and_replaces_those_measured_again(tmp_path):
    path = tmp_path / "a" / "rms_norm.csv"
    first, other, failed = row(y=36.0), row(x=1024, y=5.5), row(provider="liger", y=None, error='said "no", twice')
    records.write(path, [first, other, failed])
    assert records.read(path) == [first, other, failed]
    assert path.read_text().splitlines()[0] == (
        "kernel_name,kernel_provider,kernel_operation_mode,metric_name,metric_unit,x_name,x_label,x_value,"
        "y_value_50,y_value_20,y_value_80,extra_benchmark_config_str,gpu_name,timestamp,version"
    )
    again = row(y=35.0)
    records.write(path, [again])
    assert records.read(path) == [other, failed, again]
    assert records.read(path)[1].error == 'said "no", twice'


def test_what_was_measured_with_stands_once_a_run(tmp_path):
    """And every row that is read has it, whoever wrote it: an older CSV file may say it in each row."""
    path = tmp_path / "rms_norm.csv"
    rows = [row(x=x, torch=torch) for x in (1024, 2048, 4096) for torch in ("2.11.0", "2.13.0")][1:4]
    records.write(path, rows)
    known = records.environments(tmp_path)
    assert sorted(known.values(), key=str) == [{"driver": "580.159", "torch": version} for version in ("2.11.0", "2.13.0")]
    assert "580.159" not in path.read_text() and records.read(path) == rows
    older = path.read_text()
    for name, environment in known.items():
        older = older.replace(f'""environment"": ""{name}""', json.dumps(environment)[1:-1].replace('"', '""'))
    assert "environment" not in older and older.count("580.159") == 3
    path.write_text(older)
    assert records.read(path) == rows
    records.write(path, rows[:1])
    assert "580.159" not in path.read_text() and records.environments(tmp_path) == known


def test_rows_without_their_environment_are_refused(tmp_path):
    records.write(tmp_path / "rms_norm.csv", [row()])
    [name] = records.environments(tmp_path)
    (tmp_path / "environments.json").unlink()
    with pytest.raises(ValueError, match=f"names the environment {name}, expected one of .*environments.json"):
        records.read(tmp_path / "rms_norm.csv")


def test_merged_results_bring_their_environments(tmp_path):
    for folder, version in (("a", "2.11.0"), ("b", "2.13.0")):
        records.write(tmp_path / folder / "gpu" / "x.csv", [row(torch=version, x=len(version + folder), tokens=folder)])
    records.merge(tmp_path / "a", tmp_path / "b")
    assert {r.config["torch"] for r in records.read_all(tmp_path / "b" / "gpu")} == {"2.11.0", "2.13.0"}


def test_a_file_with_other_columns_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="expected"):
        records.read(tmp_path / "x.csv")


def test_the_columns_of_both_schemas():
    shared = "kernel_name,kernel_provider,kernel_operation_mode,metric_name,metric_unit,x_name,x_label,x_value,"
    shared += "y_value_50,y_value_20,y_value_80,extra_benchmark_config_str,gpu_name,timestamp,"
    assert ",".join(records.columns(Row)) == shared + "version"
    assert ",".join(records.columns(LigerRow)) == shared + "liger_version", "Liger-Kernel's file has these"


def test_a_file_of_ligers_schema_keeps_to_it(tmp_path):
    values = (
        "softmax",
        "liger",
        "full",
        "speed",
        "ms",
        "T",
        "sequence length",
        "1024",
        0.1,
        0.1,
        0.2,
        "{}",
        GPU,
        "2026-01-02T03:04:05Z",
        "0.8.5",
    )
    rows = [LigerRow(*values), LigerRow(*values[:7], "2048", *values[8:])]
    path = tmp_path / records.LIGER_FILE
    records.write(path, rows)
    records.write(path, rows[:1])
    assert sorted(records.read(path, LigerRow), key=lambda r: int(r.x_value)) == rows
    with pytest.raises(ValueError, match="liger_version"):
        records.read(path)
    assert records.read_all(tmp_path) == [], "what tables are made of does not see it"


def test_shapes_of_a_kind_of_their_own_do_not_replace_each_other(tmp_path):
    rows = [row("softmax", x=64, shape=shape) for shape in ("rows 2", "rows 4")]
    records.write(tmp_path / "x.csv", rows)
    assert records.read(tmp_path / "x.csv") == rows


@pytest.mark.parametrize("path", sorted(records.RESULTS.glob("*/*.csv")), ids=lambda path: path.stem)
def test_published_results_are_readable_and_stay_what_they_are(path, tmp_path):
    rows = records.read(path)
    assert rows and all(json.loads(r.extra_benchmark_config_str) for r in rows)
    records.write(tmp_path / path.name, rows)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert records.environments(tmp_path).items() <= records.environments(path.parent).items()


def test_links_to_the_sources_are_not_followed():
    """Each file of a Hub cache is a link to a blob, beside which lies nothing."""
    for path in (records.ROOT / "benchmark").glob("*.py"):
        assert ".resolve()" not in path.read_text(), path.name


def test_names():
    assert records.slug(GPU) == "nvidia-h200"
    assert models.full_name("8b") == models.full_name("Qwen3_8B") == "qwen3_8b"
    with pytest.raises(ValueError, match="expected one of"):
        models.size("7b")
    assert records.package_version().startswith("1.")


@pytest.mark.parametrize(
    ("builds", "version"),
    (
        ({"packages/qwen3_5": ("0123abc0", False)}, "+0123abc"),
        ({".": ("0123abc0", False), "packages/liger": ("0123abc0", False)}, "+0123abc"),
        ({".": ("0123abc0", False), "packages/liger": ("0123abc0", True)}, "+0123abc.dirty"),
        ({".": ("0123abc0", False), "packages/liger": ("4567def0", False)}, "+0123abc.dirty"),
    ),
)
def test_the_version_is_that_of_what_was_built(tmp_path, monkeypatch, builds, version):
    """Of whichever package: where only Qwen3.5's was built, the commit of its build, not that of the checkout."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    for folder, (commit, dirty) in builds.items():
        build = tmp_path / folder / "build" / "torch-cuda"
        build.mkdir(parents=True)
        (build / "metadata.json").write_text(json.dumps({"provenance": {"kernel": {"commit": commit, "dirty": dirty}}}))
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert records.package_version.__wrapped__() == f"1.2.3{version}"
