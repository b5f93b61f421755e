"""What the machine code of the kernels shows: how it is read, and that no GPU's falls behind the H200's without a reason."""

import subprocess

import pytest

from tools import compiler, machine_code
from tools.compiler import Job
from tools.machine_code import RECORD, Shown, all_behind, behind, kernels_of, read_record, reason_for
from tools.targets import BuildError, read_variants

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0020*/             @!UP1 UTMALDG.2D [UR8], [UR4] ;
        /*0030*/                   LDG.E.U16 R4, desc[UR6][R2.64] ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   EXIT ;
"""


def test_what_a_listing_shows():
    both, only = machine_code.counted(LISTING, [0x80]), machine_code.counted(LISTING, [0x20, 0x80])
    assert machine_code.shown_of(both[0]) == Shown(128, 1, "HGMMA", 2, 1)
    assert [machine_code.shown_of(each) for each in only] == [Shown(128), Shown(16, 1, "HGMMA", 2, 1)]
    assert machine_code.shown_of({"LDG.E.CONSTANT": 1, "HMMA.16816.F32": 3, "WARPGROUP.DEPBAR.LE": 0}) == Shown(32, 0, "HMMA", 3, 0)
    assert machine_code.shown_of({"LDG.E.64": 1, "DEPBAR.LE": 2}) == Shown(64)


@pytest.mark.parametrize("shown", (Shown(128), Shown(0, 9), Shown(16, 0, "HMMA", 7, 0), Shown(32, 8, "UTCHMMA", 16, 4)))
def test_what_is_shown_is_read_as_it_was_written(shown):
    assert Shown.of(str(shown)) == shown


WIDE, BULK, ODD, PRODUCTS = Shown(128), Shown(32, 8), Shown(16), Shown(32, 8, "HGMMA", 16, 4)


@pytest.mark.parametrize(
    "mine, architecture, theirs, said",
    (
        (WIDE, "sm_80", BULK, ""),
        (BULK, "sm_100", WIDE, ""),
        (ODD, "sm_100", ODD, ""),
        (Shown(256), "sm_100", WIDE, ""),
        (ODD, "sm_80", BULK, "loads of 16 bits and no bulk copies"),
        (Shown(64), "sm_120", WIDE, "loads of 64 bits and no bulk copies"),
        (Shown(32), "sm_120", Shown(64), "loads of 32 bits, where sm_90 has 64"),
        (BULK, "sm_100", PRODUCTS, "no matrix instruction, where sm_90 has HGMMA"),
        (Shown(128, 0, "HMMA", 8, 0), "sm_100", PRODUCTS, "HMMA, which is not the tensor core's of sm_100"),
        (Shown(128, 0, "HMMA", 8, 0), "sm_120", PRODUCTS, ""),
        (Shown(32, 8, "UTCHMMA", 8, 3), "sm_103", PRODUCTS, ""),
    ),
)
def test_what_falls_behind(mine, architecture, theirs, said):
    assert said in behind(mine, architecture, theirs) and bool(said) == bool(behind(mine, architecture, theirs))


def test_a_variant_that_the_h200_does_not_get_is_compared_with_those_of_its_function_and_dtypes():
    kernels = {
        "a-bf16.f32-TILE1": {"sm_90": WIDE},
        "a-bf16.f32-TILE2": {"sm_90": Shown(64)},
        "a-bf16.f32-TILE4": {"sm_100": Shown(64), "sm_120": ODD},
        "a-f16.f32-TILE4": {"sm_100": ODD},
    }
    assert all_behind(kernels) == {("a-bf16.f32-TILE4", "sm_120"): behind(ODD, "sm_120", WIDE)}


RECORDED = {operation: kernels_of(read_record(), operation) for operation in read_record()["operations"]}


@pytest.mark.parametrize("operation", RECORDED)
def test_no_kernel_falls_behind_without_a_reason(operation):
    """What is not recorded, or of another source, is not compared: `python -m tools.machine_code` reads it."""
    unlisted = {place: said for place, said in all_behind(RECORDED[operation]).items() if not reason_for(*place)}
    assert not unlisted


def test_every_reason_is_needed():
    found = [place for kernels in RECORDED.values() for place in all_behind(kernels)]
    for name, start in machine_code.REASONS:
        names = {variant for kernels in RECORDED.values() for variant in kernels if machine_code.function_of(variant) == name}
        places = {place for place in found if place[0] in names and place[1].startswith(start)}
        assert places or not names, f"{name} falls behind on no {start}: take its reason out"


def test_a_kernel_that_falls_behind_is_noticed():
    """Planted in the record: an attention kernel whose products have left the tensor cores of a B200."""
    kernels = {name: dict(shown) for name, shown in RECORDED.get("attention", {}).items()}
    name = next((name for name, shown in kernels.items() if {"sm_90", "sm_100"} <= shown.keys() and shown["sm_90"].matrix), None)
    if name is None:
        pytest.skip("kernel_src/attention.py has changed since it was read")
    assert not all_behind(kernels)
    kernels[name]["sm_100"] = kernels[name]["sm_100"]._replace(matrix="HMMA")
    assert list(all_behind(kernels)) == [(name, "sm_100")]


def test_the_table_has_a_line_an_architecture():
    lines = machine_code.table().splitlines()
    assert {line.split(" | ")[0].strip("| ") for line in lines[2:]} >= {"9.0", "10.0", "12.0"}
    assert len({line.count("|") for line in lines}) == 1


def test_what_was_read_is_not_read_again(tmp_path, monkeypatch):
    """Of one kernel, for a GPU of each generation: the same as nvdisasm says of the whole file; then from the record."""
    try:
        nvdisasm = machine_code.find_nvdisasm()
    except BuildError as error:
        pytest.skip(str(error))
    operation, variant = read_variants(["scale"])[0]
    bytecode, tileiras = compiler.export(variant), compiler.find_tileiras()
    images = {
        job: compiler.compile_image(job, tileiras, compiler.compiler_version(tileiras))
        for job in (Job(operation, variant, bytecode, "x86_64", architecture) for architecture in ("sm_80", "sm_90", "sm_100"))
    }
    path = tmp_path / "record.json"
    machine_code.record(images.items(), ["scale"], path)
    found = kernels_of(read_record(path), "scale")
    assert list(found) == [variant.name] and list(found[variant.name]) == ["sm_80", "sm_90", "sm_100"]
    for job, image in images.items():
        (tmp_path / "cubin").write_bytes(image)
        command = [nvdisasm, "-c", tmp_path / "cubin"]
        [whole] = machine_code.counted(subprocess.run(command, capture_output=True, text=True, check=True).stdout, [1 << 30])
        assert machine_code.shown_of(whole) == found[variant.name][job.architecture]
    before = path.read_text()
    monkeypatch.setattr(machine_code, "read", lambda *_: pytest.fail("what is known was read again"))
    machine_code.record(images.items(), ["scale"], path)
    assert path.read_text() == before
    monkeypatch.undo()
    monkeypatch.setattr(machine_code, "source_digest", lambda operation: "another")
    assert kernels_of(read_record(path), "scale") == {}
    machine_code.record([], ["scale"], path)
    assert path.read_text() == before, "what is of another source stays until it is read anew"
    machine_code.record([], ["rms_norm"], path)
    assert read_record(path)["operations"] == {}, "there is no such operation any more"


def test_without_nvdisasm_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(machine_code.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine_code.shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="pip install triton"):
        machine_code.find_nvdisasm()
    assert RECORD.parent.name == "kernel_src"
