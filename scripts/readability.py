"""Print how readable the project is: sentence lengths, complete public docstrings, short identifiers.

    python scripts/readability.py             # this checkout
    python scripts/readability.py ../before   # another one

* Sentences: the mean number of words per sentence of README.md and of each page under docs/. Only prose counts:
  paragraphs and items of lists. Code blocks, tables, headings and pictures do not count. A link counts as its text, and
  inline code counts as one word. A colon in front of a list or a code block ends a sentence.
* Docstrings: the share of public functions, methods and classes whose docstring is complete. `find_docstring_faults`
  states what is complete.
* Identifiers: names of one or two letters in tvmconv/, schedules/ and scripts/, outside `DIMENSION_LETTERS`.

`tests/test_readability.py` and `tests/test_docstrings.py` hold these figures.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CODE_FOLDERS = ("tvmconv", "schedules", "scripts")

# Letters that the field uses, and that docs/design.md and the heads of files explain.
DIMENSION_LETTERS = {
    "batch, channels, depth, height, width of the input": "n c d h w",
    "output channels, output rows, output columns": "o k p q",
    "filter depth, rows, columns": "t r s",
    "rows, columns, reduction of a matrix product; input channel of a reduction": "m n k rc ry rx rd",
    "coordinates and loop indices": "i j x y z",
    "arguments of a schedule `f(s, w, k)`: schedule, workload, knobs": "s w k",
    "factors of a tile, from the block to the thread": "b v u",
    "matrices of a product, and tensors of a convolution": "a b c X Y K A B C",
    "operation of an epilogue; block axes of TIR; CUDA's threadIdx": "op vi vj vk tx ty",
    "Winograd's matrices and their products": "g G gG Bd MA",
    "distances along axes; ends of a line": "dx dy dz x1 y1 x2 y2",
    "gradients": "dX dY dK dk",
    "MN-major operands; the L1 cache; a Gaussian process": "mn MN L1 gp",
    "names that OpenCL, PyTorch and the TIR builder use": "cl gm fn if_",
    "modules under their usual names, and the conventional names of Python": "np tc os re io T e f _ __ id ok",
}
DECLARED = {case for letters in DIMENSION_LETTERS.values() for word in letters.split() for case in (word, word.upper())}


def split_sentences(markdown: str) -> list[str]:
    """Return the sentences of a page's prose."""
    markdown = re.sub(r"^```.*?^```$|<!--.*?-->|^---\n.*?\n---$", "\n\n", markdown, flags=re.MULTILINE | re.DOTALL)
    markdown = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", markdown)
    markdown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    markdown = re.sub(r"``[^`]+``|`[^`]+`", "CODE", markdown)
    paragraphs: list[str] = []
    is_open = False
    for line in markdown.splitlines():
        text = line.strip()
        if not text or text.startswith(("|", "#", "<")):
            is_open = False
            continue
        item = re.match(r"(?:[*+-]|\d+\.) +", text)
        if item or not is_open:
            paragraphs.append(text[item.end() :] if item else text)
        else:
            paragraphs[-1] += " " + text
        is_open = True
    sentences = []
    for paragraph in paragraphs:
        text = re.sub(r"\*\*|__", "", paragraph)
        text = re.sub(r"\b(e\.g|i\.e|vs|cf|et al|Fig|No)\.", r"\1", text)
        sentences += [s for s in re.split(r"(?<=[.!?])[)\"”]?\s+(?=[A-Z0-9(\"“*])", text) if count_words(s) > 2]
    return sentences


def count_words(sentence: str) -> int:
    """Return the number of words of a sentence; numbers count, punctuation does not."""
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def compute_mean_length(page: Path) -> float:
    """Return the mean number of words per sentence of a page; 0 without prose."""
    lengths = [count_words(sentence) for sentence in split_sentences(page.read_text(encoding="utf-8"))]
    return sum(lengths) / len(lengths) if lengths else 0.0


def list_pages(root: Path) -> list[Path]:
    """Return README.md and the pages under docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def count_short_identifiers(root: Path) -> Counter[str]:
    """Return how often each undeclared name of one or two letters is bound, as a variable or as a definition."""
    counts: Counter[str] = Counter()
    for folder in CODE_FOLDERS:
        for file in (root / folder).rglob("*.py"):
            counts.update(
                name
                for name in _bound_names(ast.parse(file.read_text(encoding="utf-8")))
                if len(name.strip("_")) < 3 and name.strip("_") and not {name, name.strip("_")} & DECLARED
            )
    return counts


def _bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(asname=str(name)):
                yield name


def list_public_objects() -> Iterator[tuple[str, Any, str]]:
    """Yield the qualified name, the object and the docstring of its class for each documented public name.

    These are the names that `tvmconv` exports, those that `tvmconv.torch` exports where PyTorch is installed, and the
    methods and properties of their classes, inherited ones included.
    """
    modules = ["tvmconv"]
    try:
        importlib.import_module("tvmconv.torch")
        modules.append("tvmconv.torch")
    except ImportError:
        pass
    except Exception as error:
        if type(error).__name__ != "ModelError":
            raise
    for module_name in modules:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            exported = getattr(module, name)
            yield f"{module_name}.{name}", exported, ""
            if not inspect.isclass(exported):
                continue
            for member_name in sorted(dir(exported)):
                member = inspect.getattr_static(exported, member_name)
                if member_name.startswith("_") or not _is_documented(exported, member_name):
                    continue
                if (
                    isinstance(member, (property, staticmethod, classmethod))
                    or callable(member)
                    or hasattr(member, "func")
                ):
                    yield f"{module_name}.{name}.{member_name}", member, inspect.getdoc(exported) or ""


def _is_documented(exported: type, member_name: str) -> bool:
    """Return whether a member is defined in this package, and not inherited from Python or PyTorch."""
    owner = next(base for base in exported.__mro__ if member_name in vars(base))
    return owner.__module__.startswith("tvmconv.")


def find_docstring_faults(obj: Any, class_doc: str = "") -> list[str]:
    """Return what a public docstring lacks.

    It has to begin with one sentence. A function or method has `Args` that name the parameters of the signature, and
    `Returns` or `Yields` if it is annotated to return something. A summary that begins with "Return" or "Yield" may
    replace the latter. A function and a class have `Examples`; a method has them, or its class's examples use it. A
    class names the parameters of its constructor in `Args` or `Attributes`. A property needs the sentence only.
    """
    if isinstance(obj, (classmethod, staticmethod)):
        obj = obj.__func__
    function = obj.func if hasattr(obj, "func") else obj
    doc = inspect.getdoc(function) or ""
    faults = []
    first, _, _ = doc.partition("\n\n")
    if not first.rstrip().endswith((".", ":")):
        faults.append("no summary that is a sentence")
    if function is not obj or isinstance(obj, property):
        return faults
    is_class = inspect.isclass(obj)
    sections = split_sections(doc)
    if not (is_class and issubclass(obj, (Exception, int))):
        parameters = [
            parameter.name
            for parameter in inspect.signature(obj).parameters.values()
            if parameter.name not in ("self", "cls") and not parameter.name.startswith("_")
        ]
        documented = _entry_names(sections.get("Args", "")) + _entry_names(sections.get("Attributes", ""))
        if missing := [name for name in parameters if name not in documented]:
            faults.append(f"Args lacks {', '.join(missing)}")
        if surplus := [n for n in _entry_names(sections.get("Args", "")) if n not in parameters]:
            faults.append(f"Args has {', '.join(surplus)}, which is no parameter")
    if not is_class:
        returned = inspect.signature(obj).return_annotation
        if returned not in (None, "None", inspect.Signature.empty) and not (
            {"Returns", "Yields"} & sections.keys() or re.match(r"(Return|Yield)", doc)
        ):
            faults.append("no Returns")
    name = getattr(obj, "__name__", "")
    if ">>>" not in sections.get("Examples", "") and not re.search(rf">>>.*\b{name}\b", class_doc):
        faults.append("no Examples")
    return faults


def split_sections(doc: str) -> dict[str, str]:
    """Return the sections of a Google-style docstring by their titles."""
    parts = re.split(r"^(Args|Attributes|Returns|Yields|Raises|Examples):$", doc, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _entry_names(section: str) -> list[str]:
    return re.findall(r"^    (\w+)(?: \([^)]*\))?:", section, re.MULTILINE)


def main() -> None:
    """Print the figures of the project, or of another checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1], help="checkout of the project")
    root = parser.parse_args().root.resolve()
    if not (root / "README.md").is_file():
        parser.error(f"{root} is no checkout of the project: it has no README.md")
    print("words per sentence")
    for page in list_pages(root):
        print(f"  {compute_mean_length(page):5.1f}  {page.relative_to(root)}")
    counts = count_short_identifiers(root)
    print(f"short identifiers: {sum(counts.values())} ({len(counts)} names)")
    print("  " + " ".join(f"{name}:{count}" for name, count in counts.most_common(60)))
    sys.path.insert(0, str(root))
    faults = {name: find_docstring_faults(obj, doc) for name, obj, doc in list_public_objects()}
    complete = sum(not found for found in faults.values())
    print(f"complete public docstrings: {complete} of {len(faults)} ({complete / len(faults):.0%})")
    for name, found in faults.items():
        if found:
            print(f"  {name}: {'; '.join(found)}")


if __name__ == "__main__":
    main()
