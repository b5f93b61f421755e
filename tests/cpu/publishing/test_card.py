"""The page of a package on the Hub."""

import ast
import re

import pytest
import yaml

from tests.publishing import (
    REPO,
    ROOT,
    on_hub,
)
from tools.card import fill_card, render_card
from tools.kernel_package import PackageError, layer_names, public_names, read_package


def test_the_card_names_what_the_build_offers(package):
    package.build(archs=("8.0+PTX", "9.0a", "12.0"))
    text = (package.folder / "build" / "CARD.md").read_text()
    assert text.splitlines()[1:] == ["license: mit", "---", f"# {REPO} 1", "double triple", "Doubler Quadrupler", "8.0 9.0 12.0"]


def test_a_card_that_cannot_be_filled_says_why(package):
    (package.folder / "CARD.md").write_text("{{ unknown }}")
    with pytest.raises(PackageError, match="unknown"):
        fill_card(read_package(package.folder))
    (package.folder / "CARD.md").unlink()
    with pytest.raises(PackageError, match="CARD.md not found"):
        fill_card(read_package(package.folder))


def test_images_of_a_card_are_published_beside_it(hub, package, upload):
    """In the repository they are the charts of the results; on the Hub a page sees the files of its own branch alone."""
    (package.folder / "charts").mkdir()
    (package.folder / "charts" / "speed.png").write_bytes(b"png")
    card = package.folder / "CARD.md"
    card.write_text(card.read_text() + "\n![Speed](charts/speed.png) ![far](https://huggingface.co/x.png)\n")
    package.build()
    upload()
    assert b"![Speed](speed.png) ![far](https://huggingface.co/x.png)" in on_hub(hub, "main")["README.md"]
    assert on_hub(hub, "main")["speed.png"] == b"png"
    (package.folder / "charts" / "speed.png").unlink()
    with pytest.raises(PackageError, match="shows charts/speed.png, which is no file"):
        fill_card(read_package(package.folder))


OURS = {
    "repo_id": "some-org/qwen",
    "version": 3,
    "license": "mit",
    "functions": ["apply", "reset"],
    "layers": ["RMSNorm", "Unknown"],
    "archs": ["8.0", "12.1", "99.0"],
    "has_benchmark": False,
    "upstream": None,
}

KERNEL_BUILDER = {key: value for key, value in OURS.items() if key not in ("version", "archs")}


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_our_card_has_valid_front_matter_and_code():
    text = render_card((ROOT / "CARD.md").read_text(), OURS)
    head = yaml.safe_load(text.split("---\n")[1])
    assert head == {"library_name": "kernels", "license": "mit", "tags": ["kernels", "cutile", "cuda"]}
    assert "{" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert len(blocks(text)) == 3
    for block in blocks(text):
        ast.parse(block)
        assert "some-org/qwen" in block
        assert re.search(r"version\W+3\b", block)
    for shown in ("`apply`, `reset`", "| `RMSNorm` |", "| `Unknown` |", "| 8.0 | A100", "| 99.0 |"):
        assert shown in text


def test_kernel_builder_fills_our_card_to_the_version_of_build_toml():
    """Its fill-card knows neither version nor architectures: the defaults in the template stand in."""
    version = read_package(ROOT).version
    text = render_card((ROOT / "CARD.md").read_text(), KERNEL_BUILDER)
    assert all(re.search(rf"version\W+{version}\b", block) for block in blocks(text))
    assert "8.0 to 12.1" in text


def test_our_card_uses_only_public_names_of_the_package():
    package = read_package(ROOT)
    source = ROOT / "torch-ext" / package.name.replace("-", "_") / "__init__.py"
    if not source.exists():
        pytest.skip("the package is not there yet")
    used = set(re.findall(r"\bqwen3\.(\w+)", "".join(blocks((ROOT / "CARD.md").read_text()))))
    assert used
    assert used <= set(public_names(source.read_text(), str(source)))


@pytest.mark.parametrize("source", ['__all__ = ["a", "b"]', '__all__: list[str] = ["a", "b"]', '__all__ = (\n    "a",\n    "b",\n)'])
def test_public_names_are_read_without_running_the_module(source):
    assert public_names(f"raise SystemExit\n{source}\n", "x") == ["a", "b"]


def test_layers_are_the_public_classes():
    source = "import x\nclass A(x.B): pass\nclass _C: pass\ndef D(): pass\nif 1:\n    class E: pass\n"
    assert layer_names(source, "x") == ["A"]
