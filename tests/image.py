"""Take the steps of the Dockerfile one by one, as root, where no engine is: ``make image PREFIX=FOLDER_OF_PYTHON``.

A new Debian of FROM's release, by debootstrap, with the Python of PREFIX in /usr/local stands in for FROM. Each step
runs in a copy of it, where nothing of this machine is seen. Then the image's command runs, and each `docker run` of the
Dockerfile's first lines. Not a test of the suite, since it downloads a Debian and the wheels of torch.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
STRANGER = 12345  # what `id -u` says to a user that the image does not know
PACKAGES = (  # what python:slim has beyond a minimal Debian
    "ca-certificates,netbase,tzdata,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,"
    "libuuid1,zlib1g"
)
REACH = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")  # how the machine gets to registries
PASSED = re.compile(r"(https?|no)_proxy|pip_(index_url|cert|extra_index_url|default_timeout)", re.I)
ENTER = """set -e
mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"
[ -z "$1" ] || mount --bind "$1" "$0$2"
root=$0 user=$3; shift 3; exec chroot --userspec="$user" "$root" "$@"
"""  # $0 the root, $1 a folder of the user, $2 where it goes, $3 the user, then the command


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, such as ``("USER", "vitlab")``, long lines put together."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = [line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).split("\n")]
    return [(word.upper(), rest) for word, rest in found]


def runs(text: str) -> list[list[str]]:
    """Return what comes behind the name of the image in each `docker run` of a Dockerfile's comments."""
    (name,) = re.findall(r"^# +docker build --tag (\S+) \.$", text, re.M)
    return [shlex.split(words) for words in re.findall(rf"^# +docker run .* {name} (.*)$", text, re.M)]


def left_out(path: str, patterns: list[str]) -> bool:
    """Return whether a path below the repository is kept from an image by .dockerignore."""
    for pattern in patterns:
        parts = (
            "(?:.*/)?" if part == "**/" else "[^/]*" if part == "*" else re.escape(part)
            for part in re.split(r"(\*\*/|\*)", pattern)
        )
        if re.fullmatch("".join(parts), path):
            return True
    return False


class Image:
    """A root directory that grows step by step.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        self.user, self.cwd = "root", "/"
        self.entrypoint: list[str] = []
        self.command: list[str] = []

    def inside(self, words: list[str], user: str = "", volume: Path | None = None, **env: str) -> None:
        """Run a command in the root, seeing its own processes and files alone, and end if it fails."""
        named = [f"{name}={value}" for name, value in {**self.env, **env}.items()]
        chdir = ["sh", "-c", 'cd "$0" && exec "$@"', self.cwd]
        start = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, str(self.root)]
        place = [str(volume or ""), self.cwd, user or self.user]
        done = subprocess.run([*start, *place, "env", "-i", *named, *chdir, *words])
        if done.returncode:
            sys.exit(f"exit code {done.returncode} of {shlex.join(words)}")

    def take(self, word: str, rest: str) -> None:
        """Take one step."""
        exec_form = json.loads(rest) if rest.startswith("[") else ["/bin/sh", "-c", rest]
        match word:
            case "RUN":
                self.inside(exec_form, **{name: value for name, value in os.environ.items() if PASSED.fullmatch(name)})
            case "COPY":
                *sources, target = shlex.split(rest)
                for source in sources:
                    self.copy(source, target)
            case "ENV":
                self.env |= dict(pair.split("=", 1) for pair in shlex.split(rest))
            case "USER":
                self.user = rest
            case "WORKDIR":
                self.cwd = rest
                (self.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENTRYPOINT":
                self.entrypoint = exec_form
            case "CMD":
                self.command = exec_form
            case _:
                sys.exit(f"{__file__} cannot take the step {word}: teach it")

    def copy(self, source: str, target: str) -> None:
        """Copy a folder or file of the repository, but what .dockerignore names."""
        patterns = (ROOT / ".dockerignore").read_text().split()

        def skipped(folder: str, names: list[str]) -> list[str]:
            below = Path(folder).relative_to(ROOT).as_posix()
            return [name for name in names if left_out(name if below == "." else f"{below}/{name}", patterns)]

        place = self.root / target.lstrip("/")
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, symlinks=True, ignore=skipped, dirs_exist_ok=True)
        else:
            shutil.copy2(ROOT / source, place / source if target.endswith("/") else place)


def base(tag: str, prefix: Path, folder: Path) -> Path:
    """Return a root directory that stands in for FROM, made if it is not there."""
    wanted, release = re.fullmatch(r"python:([\d.]+)-slim-(\w+)", tag).groups()  # type: ignore[union-attr]
    asked = [prefix / "bin/python3", "-c", "import platform; print(platform.python_version())"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if version.split(".")[:2] != wanted.split(".")[:2]:
        sys.exit(f"{prefix} has Python {version}, and the Dockerfile is from {tag}")
    print(f"{tag}: Debian {release} with Python {version}", flush=True)
    place = folder / f"{release}-{version}"
    if not place.is_dir():
        new = folder / "new"
        shutil.rmtree(new, ignore_errors=True)
        words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", release, str(new)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        for name in ("bin", "lib", "include"):
            ignore = shutil.ignore_patterns("site-packages", "__pycache__", "test")
            shutil.copytree(prefix / name, new / "usr/local" / name, symlinks=True, ignore=ignore, dirs_exist_ok=True)
        Image(new).inside(["ldconfig"])  # finds libpython
        Image(new).inside(["python3", "-m", "ensurepip"])
        for name in ("python", "pip"):
            (new / "usr/local/bin" / name).unlink(missing_ok=True)
            (new / "usr/local/bin" / name).symlink_to(f"{name}3")
        new.rename(place)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix", type=Path, help="folder of a Python, which has bin/python3")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/image", help="where the roots are made")
    given = parser.parse_args()
    text = (ROOT / "Dockerfile").read_text()
    (_, tag), *steps = instructions(text)
    given.folder.mkdir(parents=True, exist_ok=True)
    root = given.folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(["cp", "-a", base(tag, given.prefix, given.folder), root], check=True)
    for path in REACH:
        shutil.copy(path, root / path.lstrip("/"))
    image = Image(root)
    for number, (word, rest) in enumerate(steps, 1):
        start = time.monotonic()
        print(f"step {number}/{len(steps)}  {word} {rest}", flush=True)
        image.take(word, rest)
        print(f"    {time.monotonic() - start:.1f} s", flush=True)
    print(f"run  {shlex.join(image.entrypoint + image.command)}", flush=True)
    image.inside(image.entrypoint + image.command)
    for words in runs(text):
        volume = given.folder / "volume"
        shutil.rmtree(volume, ignore_errors=True)
        volume.mkdir()
        os.chown(volume, STRANGER, STRANGER)
        print(f"run  as user {STRANGER}, with a folder at {image.cwd}: {shlex.join(words)}", flush=True)
        image.inside(image.entrypoint + words, user=f"{STRANGER}:{STRANGER}", volume=volume)
        written = [path.relative_to(volume).as_posix() for path in volume.rglob("*.json")]
        print(f"written  {', '.join(sorted(written)) or 'nothing'}")
        if not written:
            sys.exit("the folder of the user is empty")


if __name__ == "__main__":
    main()
