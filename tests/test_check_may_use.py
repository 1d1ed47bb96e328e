#!/usr/bin/env python3
"""The test of check_may_use.py: each kind of violation, planted in a small tree, is found, and the tree without it is clean."""

import contextlib
import io
import os
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import check_may_use

TREE = {
    "README.md": "# X\n\n## May use\n\n| folder | may use |\n|---|---|\n| `proto/base/` | nothing |\n| `proto/` | `proto/base` |\n"
    "| `kvstore/client/` | `proto` |\n| `kvstore/` | `proto` |\n| `worker/` | `kvstore/client`, `proto` |\n| `tests/` | everything |\n\n## Next\n",
    "proto/README.md": "",
    "proto/base/README.md": "",
    "kvstore/README.md": "",
    "kvstore/client/README.md": "",
    "worker/README.md": "",
    "tests/README.md": "",
    "proto/base/buf.h": "",
    "proto/base/buf.c": '#include "proto/base/buf.h"\n#include <stdio.h>\n',
    "proto/wire.proto": "",
    "proto/block.h": '#include "proto/base/buf.h"\n',
    "proto/CMakeLists.txt": "add_library(proto_base STATIC\n  base/buf.c)\nadd_library(proto STATIC block.c)\ntarget_link_libraries(proto PUBLIC proto_base m)\n",
    "kvstore/pool_private.h": "",
    "kvstore/pool.c": '#include "kvstore/pool_private.h"\n#include "proto/wire.pb-c.h"\n',
    "kvstore/client/client.h": '#include "proto/block.h"\n',
    "kvstore/CMakeLists.txt": "add_library(kvstore STATIC pool.c)\ntarget_link_libraries(kvstore proto)\nadd_library(kvclient client/client.c)\n",
    "worker/worker.c": '#include "kvstore/client/client.h"\n#include "worker.h"\n',
    "worker/worker.h": "",
    "worker/CMakeLists.txt": "set(FILES worker.c)\nadd_executable(worker ${FILES})\ntarget_link_libraries(worker PRIVATE kvclient proto) # not kvstore\n",
    "tests/test_pool.c": '#include "kvstore/pool.c"\n',
    "build/ignored.c": '#include "nowhere.h"\n',
}


class CheckMayUse(unittest.TestCase):
    def check(self, changes=None):
        """(exit status, output) for the tree above with changes {path: text}."""
        with tempfile.TemporaryDirectory() as root:
            for path, text in {**TREE, **(changes or {})}.items():
                os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(text)
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                status = check_may_use.main(["check_may_use", root])
            return status, out.getvalue()

    def assert_found(self, changes, *texts):
        status, output = self.check(changes)
        self.assertEqual(status, 1, output)
        for text in texts:
            self.assertIn(text, output)
        self.assertIn(" 1 violations", output)

    def test_clean_tree_has_no_violations(self):
        status, output = self.check()
        self.assertEqual(status, 0, output)
        self.assertIn(" 0 violations, 0 warnings", output)

    def test_include_against_the_table_is_found(self):
        self.assert_found({"proto/block.h": '\n#include "kvstore/client/client.h"\n'}, "proto/block.h:2:", "may not use kvstore/client/")

    def test_base_may_not_use_the_folder_above_it(self):
        self.assert_found({"proto/base/buf.c": '  # include "proto/block.h"\n'}, "proto/base/ may not use proto/")

    def test_allowed_subfolder_does_not_open_its_parent(self):
        self.assert_found({"kvstore/pool.h": "", "worker/worker.c": '#include "kvstore/pool.h"\n'}, "worker/ may not use kvstore/")

    def test_subfolder_with_a_row_is_apart_from_its_parent(self):
        self.assert_found({"kvstore/pool.h": "", "kvstore/client/client.h": '#include "kvstore/pool.h"\n'}, "kvstore/client/ may not use kvstore/")
        self.assert_found({"kvstore/pool.c": '#include "kvstore/client/client.h"\n'}, "kvstore/ may not use kvstore/client/")

    def test_private_header_from_outside_is_found_even_in_tests(self):
        self.assert_found({"tests/test_pool.c": '#include "kvstore/pool_private.h"\n'}, "is private to kvstore/")
        self.assert_found({"kvstore/client/client_private.h": "", "tests/test_pool.c": '#include "kvstore/client/client_private.h"\n'}, "is private to kvstore/client/")

    def test_include_of_nothing_is_found(self):
        self.assert_found({"worker/worker.c": '#include "event2/event.h"\n'}, "is no file of the project")
        self.assert_found({"worker/worker.c": '#include "proto/other.pb-c.h"\n'}, "is no file of the project")

    def test_folder_without_a_row_is_found(self):
        self.assert_found({"extra/README.md": "", "extra/x.c": '#include "proto/block.h"\n'}, "has no row")

    def test_link_against_the_table_is_found(self):
        self.assert_found({"worker/CMakeLists.txt": "add_executable(worker worker.c)\ntarget_link_libraries(worker\n  PRIVATE kvclient kvstore)\n"}, "worker/CMakeLists.txt:2:", "worker links kvstore")
        self.assert_found({"proto/CMakeLists.txt": "add_library(proto_base base/buf.c)\nadd_library(proto block.c)\ntarget_link_libraries(proto_base proto)\n"}, "proto_base links proto")

    def test_link_through_a_variable_is_found(self):
        self.assert_found({"worker/CMakeLists.txt": "set(LIBS_OF_WORKER kvclient kvstore)\nadd_executable(worker worker.c)\ntarget_link_libraries(worker PRIVATE ${LIBS_OF_WORKER})\n"}, "worker links kvstore")

    def test_same_file_name_twice_is_found(self):
        self.assert_found({"worker/buf.h": ""}, "worker/buf.h: the file name is taken by proto/base/buf.h")

    def test_folder_without_readme_is_a_warning(self):
        status, output = self.check({"tests/unit/test_a.c": "", "tests/unit/deep/test_b.c": ""})
        self.assertEqual(status, 0, output)
        self.assertIn("warning: tests/unit/deep/ has no README.md", output)
        self.assertIn(" 1 warnings", output)

    def test_missing_table_is_an_error(self):
        self.assertEqual(self.check({"README.md": "# nothing\n"})[0], 2)
        self.assertEqual(self.check({"README.md": "## May use\n\nnone\n"})[0], 2)


if __name__ == "__main__":
    unittest.main()
