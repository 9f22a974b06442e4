"""What a newcomer meets first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tailoring
from tailoring import baselines, losses, nn, random, smoothing, theory

ROOT = Path(__file__).parent.parent


def run(code: str, *options: str) -> str:
    return subprocess.run([sys.executable, *options, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_importing_it_imports_nothing_heavier_than_torch():
    code = "import sys, torch; before = set(sys.modules); import tailoring; print(*set(sys.modules) - before)"
    loaded = {name.split(".")[0] for name in run(code).split()} - sys.stdlib_module_names
    assert loaded <= {"tailoring", "torch"}, loaded


ROOMS = [
    "_untouched",
    "_trees",
    "random",
    "_sites",
    "_recurrent",
    "_kernels",
    "_recompute",
    "_watch",
    "_channels",
    "_entries",
    "_states",
    "_optimisers",
    "_apart",
    "_isolate",
    "_inner",
    "_adapted",
    "_layouts",
    "_flipped",
    "_products",
    "_merge",
    "_passes",
    "_cuda_graphs",
    "_autotune",
    "_compiled",
    "_casts",
    "_adapt",
    "_copies",
    "_taps",
]
ROOMS += [
    "_unseen",
    "_uses",
    "_convolutions",
    "_layers",
    "_weight_sites",
    "_listening",
    "_doubt",
    "_weights",
    "_learned",
    "_reuse",
    "_places",
    "_modes",
    "_batch",
    "_validate",
    "_losing",
    "_fitting",
    "_answering",
    "_compiling",
    "_tailored",
    "_outer",
    "_check",
    "_tune",
]


def test_every_room_of_the_core_has_its_place():
    assert sorted(ROOMS) == sorted(["random", *(path.stem for path in (ROOT / "tailoring").glob("_[!_]*.py"))])


def test_the_map_of_the_code_names_every_file_of_the_core():
    named = set(re.findall(r"`(_?\w+)\.py`", (ROOT / "docs" / "code.md").read_text()))
    assert named - {"__main__", "baselines"} == {*ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_torch_and_earlier_rooms_only(room):
    text = (ROOT / "tailoring" / f"{room}.py").read_text()
    ours = {a or b for a, b in re.findall(r"^from (?:\.(\w+) import|\. import (\w+))", text, re.M)}
    assert ours <= set(ROOMS[: ROOMS.index(room)])
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.M)) <= sys.stdlib_module_names | {"torch"}


def test_public_names_are_documented():
    undocumented = [name for name in vars(tailoring) if not name.startswith("_") and not (getattr(tailoring, name).__doc__ or "").strip()]
    assert not undocumented


def test_the_reference_lists_every_public_name():
    def public(room: ModuleType) -> list[str]:
        names = getattr(room, "__all__", None) or [
            name for name, value in vars(room).items() if getattr(value, "__module__", "").startswith(room.__name__)
        ]
        return [name for name in names if not name.startswith("_") and not isinstance(getattr(room, name), ModuleType)]

    rooms = (tailoring, baselines, losses, nn, random, smoothing, theory)
    listed = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(), re.M)
    assert sorted(listed) == sorted(f"{room.__name__}.{name}" for room in rooms for name in public(room))


PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_the_docs_lead_somewhere(page):
    words = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / page).read_text(), flags=re.S)  # code calls model.blocks[0](x), which is no link
    links = re.findall(r"\]\(([^)\s]+)\)", words)
    local = [link.split("#")[0] for link in links if not link.startswith(("http:", "https:", "#"))]
    assert [link for link in local if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("index", ["docs/index.md", "mkdocs.yml"])
def test_every_page_is_listed(index):
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / index).read_text()))
    assert {page.removeprefix("docs/") for page in PAGES} - {"README.md", "index.md"} <= listed


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_in_the_docs_run(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    namespace: dict[str, object] = {}
    for block in blocks:  # one page is one session: later blocks use what earlier ones made
        exec(compile(block, page, "exec"), namespace)


def test_the_wheel_holds_the_package_and_its_type_marker(tmp_path):
    build = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stderr
    (wheel,) = tmp_path.glob("tailoring-*.whl")
    assert tailoring.__version__ in wheel.name
    target = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)],
        check=True,
        capture_output=True,
    )
    assert (target / "tailoring" / "py.typed").exists()
    assert run(f"import sys; sys.path.insert(0, {str(target)!r}); import tailoring; print(tailoring.__file__)", "-P").startswith(
        str(target)
    )
