"""Fill CARD.md, the template of a package's page on the Hub, into build/CARD.md.

    python -m tools.card [--package DIR]

The template gets what kernel-builder's `fill-card` gives it (`repo_id`, `functions`, `layers`, `has_benchmark`,
`upstream`, `license`), and `version` and `archs` besides; it has defaults for these two, so both tools can fill it.
Functions, layers and architectures are those of the built variants: the page shows what is uploaded.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import jinja2

from tools.kernel_package import (
    ROOT,
    Package,
    PackageError,
    layer_names,
    layers_file,
    package_folders,
    public_names,
    read_package,
    variant_archs,
)


def card_values(package: Package) -> dict[str, Any]:
    """What the template shows of `package`.

    Raises:
        PackageError: if the package is not built or has no repo-id.
    """
    if package.repo_id is None:
        raise PackageError(f"{package.folder / 'build.toml'} has no repo-id under [general.hub]; the card needs it")
    variants = package.variants()
    if not variants:
        raise PackageError(f"{package.build} holds no variant; build the package first")
    names: dict[str, None] = {}
    layers: dict[str, None] = {}
    archs: dict[str, None] = {}
    for variant in variants:
        init = variant / "__init__.py"
        if not init.is_file():
            raise PackageError(f"{init} is missing; build the package again")
        names.update(dict.fromkeys(public_names(init.read_text(encoding="utf-8"), str(init))))
        source = layers_file(variant)
        if source:
            layers.update(dict.fromkeys(layer_names(source.read_text(encoding="utf-8"), str(source))))
        archs.update(dict.fromkeys(capability(arch) for arch in variant_archs(variant)))
    return {
        "repo_id": package.repo_id,
        "version": package.version,
        "license": package.license.lower(),
        "functions": [name for name in names if name != "layers"],
        "layers": list(layers),
        "archs": list(archs),
        "has_benchmark": (package.folder / "benchmarks" / "benchmark.py").is_file(),
        "upstream": package.upstream,
    }


def capability(arch: str) -> str:
    """The compute capability in an architecture of metadata.json: "9.0a" and "9.0+PTX" are for "9.0"."""
    return arch.removesuffix("+PTX").rstrip("af")


def render_card(template: str, values: dict[str, Any]) -> str:
    """`template` filled in.

    Raises:
        PackageError: if the template is wrong or uses a value that is not given.
    """
    # trim_blocks as in kernel-builder, so that both give the same text.
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    try:
        return environment.from_string(template).render(values)
    except jinja2.TemplateError as error:
        raise PackageError(f"CARD.md cannot be filled: {error}") from error


IMAGE = re.compile(r"(!\[[^\]]*\]\()(?!https://)([^)\s]+)(\))")


def with_images(text: str, folder: Path) -> tuple[str, dict[str, Path]]:
    """A card whose images lie beside it, as on the Hub, and these images by name.

    folder: that its links lead from; what a copy of a package has not got is taken from this repository.

    Raises:
        PackageError: if an image is missing, or two have one name.
    """
    images: dict[str, Path] = {}
    for _, target, _ in IMAGE.findall(text):
        places = ((folder / target).resolve(), ROOT / re.sub(r"^(\.\./)+", "", target))
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise PackageError(f"CARD.md shows {target}, which is no file; write it, or take it out")
        if images.setdefault(path.name, path) != path:
            raise PackageError(f"CARD.md shows two images of the name {path.name}; expected names of their own")
    return IMAGE.sub(lambda image: f"{image[1]}{Path(image[2]).name}{image[3]}", text), images


def fill_card(package: Package) -> Path:
    """Write build/CARD.md and, beside it, the images that it shows.

    Raises:
        PackageError: if there is no CARD.md, it cannot be filled, an image is missing, or the package is not built.
    """
    template = package.folder / "CARD.md"
    if not template.is_file():
        raise PackageError(f"{template} not found; expected the template of the package's page on the Hub")
    text, images = with_images(render_card(template.read_text(encoding="utf-8"), card_values(package)), template.parent)
    target = package.build / "CARD.md"
    for old in package.build.glob("*.png"):
        old.unlink()
    for name, path in images.items():
        shutil.copyfile(path, package.build / name)
    temporary = target.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, target)
    return target


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.card", description="Fill CARD.md into build/CARD.md.")
    parser.add_argument("--package", help="folder with build.toml and build/; default: every package of this repository")
    options = parser.parse_args(arguments)
    try:
        for folder in package_folders(options.package):
            print(fill_card(read_package(folder)))
    except PackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
