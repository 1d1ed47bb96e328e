#!/usr/bin/env python3
"""Checks the structure of the tree against the table "May use" in README.md.

* An #include of a project header, and a target_link_libraries of a project target, must go to a folder that the table allows.
* A *_private.h is included from its own folder alone.
* File names are unique in the tree, so that a name in a log or a comment says which file is meant.
* A source folder without a README.md of its own or right above it is reported as a warning.

Usage: check_may_use.py [ROOT]. Exit status 0: nothing found, 1: violations (one a line on stdout), 2: the table cannot be read.

The row of a file is the one with the longest folder that contains it. A folder may use itself, what its row names, and what lies below
that. The words "nothing" and "everything" mean what they say; words without backticks are for people.
"""

import os
import re
import sys

SOURCE_SUFFIXES = (".c", ".h", ".cpp", ".cu", ".cuh", ".py", ".sh")
SKIPPED_FOLDERS = re.compile(r"^(build.*|models|shared|node_modules|__pycache__|\..*)$")
# Names that tools give a meaning of their own in every folder.
SHARED_NAMES = {"README.md", "CMakeLists.txt", "__init__.py", "conftest.py"}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
TABLE_ROW = re.compile(r"^\|\s*`([^`]+)`\s*\|(.*)\|\s*$")


class TableError(Exception):
    pass


def under(path, folder):
    return path == folder or path.startswith(folder + "/")


def read_table(root):
    """{folder: set of folders it may use, or None for everything}"""
    try:
        with open(os.path.join(root, "README.md"), encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise TableError(f"README.md: {error.strerror}") from error
    section = re.search(r"^## May use\s*$(.*?)(?=^## |\Z)", text, re.M | re.S)
    if not section:
        raise TableError('README.md has no section "## May use"')
    table = {}
    for line in section.group(1).splitlines():
        row = TABLE_ROW.match(line)
        if row:
            allowed = {name.strip("/") for name in re.findall(r"`([^`]+)`", row.group(2))}
            table[row.group(1).strip("/")] = None if "everything" in row.group(2) else allowed
    if not table:
        raise TableError('the section "## May use" of README.md has no rows')
    return table


def walk(root):
    """Paths of all files, relative to the root, without build trees and hidden folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(s for s in subfolders if not SKIPPED_FOLDERS.match(s))
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), root)


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
        return file.read()


def row_of(table, path):
    rows = [folder for folder in table if under(path, folder)]
    return max(rows, key=len) if rows else None


def may_use(table, user, used):
    """Whether the file `user` may use the file or folder `used`."""
    row = row_of(table, user)
    allowed = table[row]
    if allowed is None:
        return True
    if any(under(used, folder) for folder in allowed):
        return True
    # A folder may use itself, but not a subfolder that has a row of its own.
    return row_of(table, used) == row


class Checker:
    def __init__(self, root):
        self.root = root
        self.table = read_table(root)
        self.paths = list(walk(root))
        self.known = set(self.paths)
        self.violations = []
        self.warnings = []

    def report(self, where, text):
        self.violations.append(f"{where}: {text}")

    def resolve(self, path, name):
        """The project file that an include in `path` means, or None."""
        beside = os.path.normpath(os.path.join(os.path.dirname(path), name))
        for candidate in (name, beside):
            if candidate in self.known:
                return candidate
        generated = re.sub(r"\.pb-c\.h$", ".proto", name)
        return generated if generated in self.known else None

    def check_include(self, path, line, name):
        where = f"{path}:{line}"
        used = self.resolve(path, name)
        if used is None:
            self.report(where, f'includes "{name}", which is no file of the project (a system header goes in <>)')
            return
        if used.endswith("_private.h") and os.path.dirname(used) != os.path.dirname(path):
            self.report(where, f'includes "{name}", which is private to {os.path.dirname(used)}/')
        if row_of(self.table, path) is None:
            self.report(where, "this folder has no row in the table of README.md")
        elif not may_use(self.table, path, used):
            self.report(where, f'includes "{name}", but {row_of(self.table, path)}/ may not use {os.path.dirname(used)}/')

    def check_includes(self):
        for path in self.paths:
            if path.endswith((".c", ".h", ".cu", ".cuh")):
                text = read(self.root, path)
                for match in INCLUDE.finditer(text):
                    self.check_include(path, text.count("\n", 0, match.start(1)) + 1, match.group(1))

    def check_links(self):
        lists = [CMakeList(self.root, path) for path in self.paths if os.path.basename(path) == "CMakeLists.txt"]
        targets = {}
        for cmake in lists:
            targets.update(cmake.targets)
        for cmake in lists:
            for line, target, library in cmake.links:
                self.check_link(f"{cmake.path}:{line}", targets.get(target), target, targets.get(library), library)

    def check_link(self, where, user, target, used, library):
        if user is None or used is None or row_of(self.table, user) is None:
            return  # a library from outside, or a target that is built of others
        if not may_use(self.table, user, used):
            self.report(where, f"{target} links {library}, but {row_of(self.table, user)}/ may not use {used}/")

    def check_names(self):
        seen = {}
        for path in self.paths:
            name = os.path.basename(path)
            if not name.endswith(SOURCE_SUFFIXES) or name in SHARED_NAMES:
                continue
            if name in seen:
                self.report(path, f"the file name is taken by {seen[name]}")
            seen[name] = path

    def check_readmes(self):
        folders = {os.path.dirname(path) for path in self.paths if path.endswith((".c", ".cu"))}
        for folder in sorted(folders):
            if not {os.path.join(folder, "README.md"), os.path.join(os.path.dirname(folder), "README.md")} & self.known:
                self.warnings.append(f"{folder}/ has no README.md, and neither has the folder above it")

    def run(self):
        self.check_includes()
        self.check_links()
        self.check_names()
        self.check_readmes()


class CMakeList:
    """The targets that one CMakeLists.txt makes, and what they link."""

    COMMAND = re.compile(r"^\s*(\w+)\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)", re.M)

    def __init__(self, root, path):
        self.path = path
        self.folder = os.path.dirname(path)
        self.variables = {}
        self.targets = {}  # name: folder of its sources
        self.links = []  # (line, target, library)
        text = re.sub(r"#[^\n]*", lambda m: " " * len(m.group()), read(root, path))
        for match in self.COMMAND.finditer(text):
            self.line = text.count("\n", 0, match.start(1)) + 1
            self.command(match.group(1).lower(), self.expand(match.group(2)))

    def expand(self, text):
        words = []
        for word in text.split():
            name = re.fullmatch(r"\$\{(\w+)\}", word)
            words.extend(self.variables.get(name.group(1), [word]) if name else [word])
        return words

    def command(self, name, words):
        if not words:
            return
        if name == "set":
            self.variables[words[0]] = words[1:]
        elif name in ("add_library", "add_executable"):
            self.targets[words[0]] = self.source_folder(words[1:])
        elif name == "target_link_libraries":
            self.link(words[0], words[1:])
        elif name in ("tidepool_test", "tidepool_fuzz") and "LIBS" in words:
            self.link(words[0], words[words.index("LIBS") + 1 :])

    def link(self, target, words):
        for word in words:
            if word not in ("PUBLIC", "PRIVATE", "INTERFACE"):
                self.links.append((self.line, target, word))

    def source_folder(self, words):
        """The deepest folder that holds all named sources."""
        folders = {os.path.normpath(os.path.join(self.folder, os.path.dirname(w))) for w in words if w.endswith((".c", ".cu")) and "$" not in w}
        return os.path.commonpath(folders) if folders else self.folder


def main(arguments):
    root = arguments[1] if len(arguments) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    try:
        checker = Checker(root)
    except TableError as error:
        print(f"check_may_use: {error}", file=sys.stderr)
        return 2
    checker.run()
    for text in checker.warnings:
        print(f"warning: {text}")
    for text in checker.violations:
        print(text)
    print(f"check_may_use: {len(checker.paths)} files, {len(checker.violations)} violations, {len(checker.warnings)} warnings")
    return 1 if checker.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
