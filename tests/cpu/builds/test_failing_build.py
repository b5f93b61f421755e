"""What fails a build of kernels, and what the command says."""

import contextlib
import re
import shutil
from dataclasses import replace

import pytest

from kernel_src.prebuild import PerArchitecture
from tests.building import KERNELS, ONE, QUIET, cubins_folder, image_of, kept, variant_of, write
from tools import build_checks, compiler, targets
from tools import compile as compile_
from tools.compiler import Job
from tools.elf import resources
from tools.targets import TARGETS, BuildError


def test_a_kernel_that_the_front_end_refuses_is_named_with_the_message(package, tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, KERNELS.replace("ct.full((TILE,), 2.0", "ct.full((TILE + 1,), 2.0"))
    with pytest.raises(BuildError, match="(?s)^second-f32-TILE64: .*65") as error:
        compile_.build(package, ONE, **QUIET)
    assert "power of two" in str(error.value).lower() or "tiny.py" in str(error.value)


def test_bytecode_that_the_compiler_refuses_names_kernel_architecture_host_and_message(cache):
    variant = variant_of("scale", "scale_in_place")
    tileiras = compiler.find_tileiras()
    with pytest.raises(BuildError) as error:
        compiler.compile_image(Job("scale", variant, b"no bytecode", "aarch64", "sm_110"), tileiras, "0")
    head, _, message = str(error.value).partition(": ")
    assert head == f"{variant.name} for sm_110 on aarch64" and message
    assert not kept(cache)


def failing_compiler(tmp_path, monkeypatch, message, status=1):
    """Puts the compiler aside for one that refuses sm_100."""
    path = tmp_path / "tileiras"
    refuse = f'case "$*" in *sm_100*) echo "{message}" >&2; exit {status};; esac'
    path.write_text(f'#!/bin/sh\n{refuse}\nexec {compiler.find_tileiras()} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setattr(compiler, "find_tileiras", lambda: str(path))


@pytest.mark.parametrize(("message", "status"), (("error: too many tiles", 1), ("error: no output", 0), ("", 3)))
def test_a_compiler_that_fails_on_one_architecture_fails_the_build(cache, package, tmp_path, monkeypatch, message, status):
    failing_compiler(tmp_path, monkeypatch, message, status)
    with pytest.raises(BuildError, match=rf"^(first|second)-f32-TILE\d+ for sm_100 on x86_64: {message or 'exit status 3'}"):
        compile_.build(package, {"x86_64": ("sm_90", "sm_100")}, **QUIET)
    assert not cubins_folder(package).exists()


def test_a_kernel_that_spills_without_a_reason_is_named_with_its_bytes():
    variant = spilling()
    image = image_of(variant)
    found = resources(image)
    assert found.stack > 0
    job = Job("rms_norm", variant, b"", "x86_64", "sm_90")
    expected = rf"{variant.name} for sm_90 on x86_64: {found.stack} bytes of stack, {found.registers} registers"
    with pytest.raises(BuildError, match=expected):
        build_checks.check_resources({job: image})
    build_checks.check_resources({Job("rms_norm", replace(variant, spills="measured"), b"", "x86_64", "sm_90"): image})


def test_a_reason_for_spills_that_is_not_needed_is_named(cache, package, tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, KERNELS.replace('Variant(second, {"x": x, "TILE": tile})',
                                                 'Variant(second, {"x": x, "TILE": tile}, spills="?")'))
    compile_.build(package, ONE, **QUIET)  # another architecture may need it
    monkeypatch.setattr(compile_, "TARGETS", ONE)
    with pytest.raises(BuildError, match="spill nowhere give a reason") as error:
        compile_.build(package, ONE, **QUIET)
    assert str(error.value).splitlines()[1:] == ["second-f32-TILE128", "second-f32-TILE64"]


@pytest.mark.parametrize("params", ('"TILE": tile, "x": x', '"x": x', '"x": x, "TILE": tile, "ROWS": 1'))
def test_parameters_that_are_not_the_kernels_in_its_order_are_named(tmp_path, monkeypatch, params):
    """Two constants that changed places would be compiled as each other."""
    module = write(tmp_path, monkeypatch, KERNELS.replace('"x": x, "TILE": tile', params))
    with pytest.raises(ValueError, match="params of first are .*, expected x, TILE, in this order"):
        next(module.variants())


def spilling():
    """A row of 5120 with as many blocks an SM as fit no registers."""
    return replace(
        variant_of("rms_norm", "rms_norm_backward-bf16.bf16.bf16.bf16.f32.f32-TILE4096-TAIL1024"), hints={"occupancy": 8}, spills=""
    )


def test_all_kernels_that_spill_are_named():
    variant = spilling()
    image = image_of(variant)
    jobs = [Job("rms_norm", variant, b"", "x86_64", a) for a in ("sm_90", "sm_100")]
    with pytest.raises(BuildError) as error:
        build_checks.check_resources(dict.fromkeys(jobs, image))
    assert "for sm_90" in str(error.value) and "for sm_100" in str(error.value)


def test_code_for_another_architecture_or_host_is_named():
    variant = variant_of("scale", "scale_in_place")
    image = image_of(variant)
    build_checks.check_code({Job("scale", variant, b"", "x86_64", "sm_90"): image})
    for host, architecture in (("x86_64", "sm_100"), ("aarch64", "sm_90")):
        with pytest.raises(BuildError, match=f"scale_in_place.* for {architecture} on {host}: .*sm_90"):
            build_checks.check_code({Job("scale", variant, b"", host, architecture): image})


def test_more_registers_than_the_occupancy_allows_are_named():
    variant = variant_of("column_sum", "column_sum")
    image = image_of(variant)
    build_checks.check_occupancy({Job("column_sum", variant, b"", "x86_64", "sm_90"): image})
    for hint in (32, PerArchitecture(1, "sm_90", 32)):
        asking = replace(variant, hints={"occupancy": hint})
        with pytest.raises(BuildError, match="registers, .* blocks, asked for 32"):
            build_checks.check_occupancy({Job("column_sum", asking, b"", "x86_64", "sm_90"): image})
    assert [build_checks.occupancy(asking, name) for name in ("sm_80", "sm_90")] == [1, 32]


def test_two_variants_of_one_name_are_refused(package, tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, KERNELS.replace("Variant(second", "Variant(first"))
    with pytest.raises(BuildError, match="two variants are called first-f32-TILE64 .*tiny and tiny"):
        compile_.build(package, ONE, **QUIET)


@pytest.mark.parametrize(
    "text", ("x86_64", "x86_64:", "x86_64:sm_91", "x86_64:sm_110", "mips:sm_90", "sm_90", "x86_64:sm_90,", "x86_64:sm_90 aarch64:sm_80")
)
def test_a_wrong_target_is_answered_with_the_possible_ones(text):
    with pytest.raises(BuildError, match="no target") as error:
        targets.parse_targets(text)
    assert text.split()[-1] in str(error.value)
    for host, names in TARGETS.items():
        assert f"{host}:{','.join(names)}" in str(error.value)


def test_the_variants_of_another_gpu_are_built_for_the_one_that_is_here():
    """Those of the delta rule's backward pass, of which sm_90 has others than sm_80; nobody's targets are what it has besides. Those that
    the other one does not get keep their place, without an image, as in its own manifest."""
    here = {"x86_64": ("sm_90",)}
    variants = targets.read_variants(["gated_delta_backward", "scale"])
    found = targets.variants_of(variants, "sm_80", here)
    assert [variant.name for _, variant in found] == [variant.name for _, variant in variants]
    built = [variant for _, variant in found if targets.targets_of(variant, here)]
    assert {variant.kernel_name for variant in built} >= {"delta_gates", "delta_keys"}
    assert "delta_inverse" not in {variant.kernel_name for variant in built}
    wanted = {variant.name for _, variant in variants if targets.targets_of(variant, {"x86_64": ("sm_80",)})}
    assert {variant.name for variant in built} == wanted
    assert all(targets.targets_of(variant, TARGETS) == [("x86_64", "sm_90"), ("aarch64", "sm_90")] for variant in built)
    with pytest.raises(BuildError, match="not for every target"):
        targets.variants_of(variants, "sm_80", TARGETS)
    with pytest.raises(BuildError, match="no architecture 'sm_70'; there are sm_80, "):
        targets.variants_of(variants, "sm_70", here)


@pytest.mark.parametrize("like", ("", "sm_90"))
def test_what_spills_away_from_home_is_no_failure(cache, package, monkeypatch, like):
    """A kernel that was made for another GPU's registers runs on this one all the same."""
    monkeypatch.setattr(compile_, "read_variants", lambda names: [("rms_norm", spilling())])
    monkeypatch.setattr(compile_, "pack", lambda *_: {})
    monkeypatch.setattr(compile_, "write_folder", lambda *_: None)
    with contextlib.nullcontext() if like else pytest.raises(BuildError, match="spill registers"):
        compile_.build(package, ONE, **QUIET, like=like)


@pytest.mark.parametrize("options", (("--like", "sm_80"), ("--record", "--here")))
def test_options_that_nobody_is_to_get_a_build_of_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        compile_.main(list(options))
    assert options[0] in capsys.readouterr().err


def test_targets_are_read_as_they_are_written():
    assert targets.parse_targets(None) == targets.parse_targets("") == TARGETS
    assert targets.parse_targets("x86_64:sm_90,sm_100 aarch64:sm_90") == {"x86_64": ("sm_90", "sm_100"), "aarch64": ("sm_90",)}


def test_a_missing_compiler_is_named_with_the_cure(monkeypatch):
    monkeypatch.setattr(compiler.metadata, "files", lambda name: [])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="tileiras was not found. Install it with: pip install"):
        compiler.find_tileiras()


def printed(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_the_command_prints_the_error_as_it_is_and_ends_with_1(cache, package, tmp_path, monkeypatch, capsys):
    """A compiler's message is full of brackets, which are no markup."""
    message = "error: [rows] of tile<4xf32> [/end] [red]"
    failing_compiler(tmp_path, monkeypatch, message)
    assert compile_.main(["--package", str(package.folder), "--targets", "x86_64:sm_100"]) == 1
    assert f"for sm_100 on x86_64: {message}" in printed(capsys)


def test_the_command_says_that_there_is_no_package(tmp_path, capsys):
    assert compile_.main(["--package", str(tmp_path)]) == 1
    assert "build.toml not found" in printed(capsys)


def test_the_command_prints_a_summary(cache, package, capsys):
    assert compile_.main(["--package", str(package.folder), "--targets", "x86_64:sm_90"]) == 0
    text = printed(capsys)
    assert "tiny" in text and "4 cubins in 0 s" in re.sub(r"in \d+ s", "in 0 s", text)
