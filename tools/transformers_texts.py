"""Records what releases of transformers say in the functions that the layers stand in for or rely on.

    python -m tools.transformers_texts 5.25.0        downloads releases and records them in shared/hf/family/known_texts.json and docs
    python -m tools.transformers_texts --add transformers.models.x.modeling_x XRMSNorm.forward XAttention.forward apply_rotary_pos_emb
                                                     records texts of a new family, in every tested release
    python -m tools.transformers_texts --check       says which texts of the installed release are not known

A release is recorded when the tests are green with it (make test-versions). Texts that no other release has are listed: look at each.
"""

import argparse
import difflib
import json
import re
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ROOT / "torch-ext/shared/hf/family/known_texts.json"
DOCUMENT = ROOT / "docs/integrations.md"
ENVIRONMENTS = ROOT / "tests/environments.py"
WHEELS = ROOT / ".cache/transformers"
fingerprints: Callable = runpy.run_path(str(KNOWN.parents[1] / "parts/fingerprint.py"))["fingerprints"]
Texts = dict[str, dict[str, dict[str, str]]]  # module -> name -> the first release with a text -> its fingerprint


def source_in_wheel(version: str) -> Callable[[str], str]:
    """A function that returns the source of a module of a release, "" for a module that it lacks; downloads its wheel first."""
    wheel = WHEELS / f"transformers-{version}-py3-none-any.whl"
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(WHEELS), f"transformers=={version}"]
        subprocess.run(command, check=True)
    archive = zipfile.ZipFile(wheel)
    present = set(archive.namelist())

    def source(module: str) -> str:
        path = f"{module.replace('.', '/')}.py"
        return archive.read(path).decode() if path in present else ""

    return source


def installed_source(module: str) -> str:
    import transformers

    path = Path(transformers.__path__[0], *module.split(".")[1:]).with_suffix(".py")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def tested() -> tuple[str, ...]:
    """The recorded releases, the oldest first."""
    return tuple(json.loads(KNOWN.read_text(encoding="utf-8"))["tested"])


def unknown(texts: Texts, source: Callable[[str], str]) -> dict[tuple[str, str], str]:
    """(module, name) -> the fingerprint of each text of a release that no recorded one has."""
    found = {}
    for module, names in texts.items():
        for name, fingerprint in fingerprints(source(module), names).items():
            if fingerprint not in names[name].values():
                found[module, name] = fingerprint
    return found


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def record(texts: Texts, tested: Sequence[str], sources: Mapping[str, Callable[[str], str]]) -> tuple[Texts, tuple[str, ...]]:
    """The texts and the tested releases with some more of these. A text stands under the first release that has it."""
    releases = sorted({*tested, *sources}, key=number)
    made: Texts = {module: {name: {} for name in names} for module, names in texts.items()}
    for module, names in texts.items():
        for release in releases:
            new = fingerprints(sources[release](module), names) if release in sources else {}
            for name, before in names.items():
                fingerprint = new.get(name, before.get(release))
                if fingerprint is not None and fingerprint not in made[module][name].values():
                    made[module][name][release] = fingerprint
    return made, tuple(releases)


def written(texts: Texts, tested: Sequence[str]) -> str:
    """The file, with a line for each name."""
    modules = []
    for module, names in texts.items():
        rows = ",\n".join(f"   {json.dumps(name)}: {json.dumps(of_name)}" for name, of_name in names.items())
        modules.append(f"  {json.dumps(module)}: {{\n{rows}\n  }}")
    return f'{{\n "tested": {json.dumps(list(tested))},\n "texts": {{\n' + ",\n".join(modules) + "\n }\n}\n"


def documented(text: str, tested: Sequence[str]) -> str:
    """The document with the tested releases in its table of versions."""
    minors = [".".join(version.split(".")[:2]) for version in (tested[0], tested[-1])]
    row = f"| transformers | {minors[0]} | {minors[1]} | {', '.join(tested)} |"
    return re.sub(r"^\| transformers \| [\d.]+ \| [\d.]+ \| .* \|$", row, text, flags=re.MULTILINE)


def with_newest(text: str, release: str) -> str:
    """The file of the tests' environments with a release in those that have the newest one."""
    return re.sub(r'^(    "newest.*"transformers==)[^"]+', rf"\g<1>{release}", text, flags=re.MULTILINE)


def changes(before: str, after: str, name: str) -> str:
    """What differs between two sources, of the top-level definition that a name is in."""
    def lines_of(text: str) -> list[str]:
        lines = text.splitlines()
        top = name.split(".")[0]
        start = next((i for i, line in enumerate(lines) if re.match(rf"(class|def) {top}\b", line)), None)
        if start is None:
            return []
        end = next((i for i in range(start + 1, len(lines)) if re.match(r"[^\s#)\]]", lines[i])), len(lines))
        return lines[start:end]

    return "\n".join(difflib.unified_diff(lines_of(before), lines_of(after), "before", "after", lineterm="", n=1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", help="of transformers, such as 5.25.0")
    parser.add_argument("--check", action="store_true", help="only look at the installed release; 1 when it has texts that are not known")
    parser.add_argument("--add", nargs="+", metavar="NAME", default=[], help="a module of transformers and names in it")
    options = parser.parse_args(arguments)
    if sum(map(bool, (options.check, options.releases, options.add))) != 1:
        parser.error("expected releases to record, or --add, or --check")
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    texts, releases = known["texts"], tuple(known["tested"])
    if options.add:
        module, *names = options.add
        texts.setdefault(module, {}).update({name: {} for name in names if name not in texts.get(module, {})})
        options.releases = releases
    if options.check:
        found = unknown(texts, installed_source)
        print("\n".join(f"{module}: {name}" for module, name in found) or "every text is known")
        return bool(found)
    sources = {version: source_in_wheel(version) for version in options.releases}
    before = None if options.add or not releases else source_in_wheel(releases[-1])
    for version, source in sources.items():
        for module, name in {} if options.add else unknown(texts, source):
            print(f"{version} has a text of its own of {module}: {name}")
            if before is not None:
                print(changes(before(module), source(module), name))
    texts, releases = record(texts, releases, sources)
    KNOWN.write_text(written(texts, releases), encoding="utf-8")
    ENVIRONMENTS.write_text(with_newest(ENVIRONMENTS.read_text(encoding="utf-8"), releases[-1]), encoding="utf-8")
    DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8"), releases), encoding="utf-8")
    print(f"{KNOWN.relative_to(ROOT)} knows {', '.join(releases)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
