"""Only trusted files are installed or read: wheels of dist/, and a cache in a shared folder."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest
from launching import ROOT

from tfcommx.core import ConfigurationError
from tfcommx.launch.launcher import cache_folder

# A shell's command ends with its line, one in Python with the call or the tuple
INSTALLATION = re.compile(r"pip install\b([^\n`]*)|\"install\",([^)]*)\)")
BY_NAME = re.compile(r"(tfcommx|horovod)(\[.*\])?([=<>~!].*)?")
OTHER_SOURCES = ("-f", "--find-links", "-i", "--index-url", "--extra-index-url")


def names_in(text: str) -> list[str]:
    """Return the words with which an installation would take our packages from a registry."""
    found = []
    for command in INSTALLATION.finditer(text.replace("\\\n", " ")):
        for word in re.findall(r"[^\s,'\"()]+", command[1] or command[2] or ""):
            if BY_NAME.fullmatch(word) or word.partition("=")[0] in OTHER_SOURCES:
                found.append(word)
    return found


def test_wheels_are_installed_by_path() -> None:
    """With --find-links and a name, pip took a higher version from the registry."""
    folders = ("docs", "scripts", "tfcommx", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {
        path: path.read_text(errors="ignore")
        for path in (*files, *ROOT.glob("*.md"), ROOT / "setup.py", ROOT / "Makefile")
        if path.suffix in (".md", ".py", ".sh", ".yml", ".yaml", "")
    }
    assert len([text for text in texts.values() if INSTALLATION.search(text)]) > 10
    named = {str(path.relative_to(ROOT)): names_in(text) for path, text in texts.items()}
    assert not {path: words for path, words in named.items() if words}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("    pip install dist/*.whl\n", []),
        ("pip install --no-deps dist/tfcommx-*.whl", []),
        ("pip install --find-links dist horovod tfcommx", ["--find-links", "horovod", "tfcommx"]),
        (
            "pip install --no-cache-dir \\\n    --find-links=/dist tfcommx==1.0 && true",
            ["--find-links=/dist", "tfcommx==1.0"],
        ),
        ("`pip install 'tfcommx[ray]'` on tfcommx", ["tfcommx[ray]"]),
        ('("pip", "install",\n "-f", wheels, "tfcommx")', ["-f", "tfcommx"]),
    ],
)
def test_installations_by_name_are_found(command: str, words: list[str]) -> None:
    assert names_in(command) == words


def test_a_cache_among_temporary_files_is_this_user_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user could make the folder first, with files of theirs for the next run to read."""

    def no_home() -> Path:
        raise RuntimeError("no home")

    for name in ("TFCOMMX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"tfcommx-{os.getuid()}"
    assert cache_folder() == folder and folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder
    folder.chmod(0o770)
    with pytest.raises(ConfigurationError, match="0770"):
        cache_folder()
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match=re.escape(str(folder))):
        cache_folder()
