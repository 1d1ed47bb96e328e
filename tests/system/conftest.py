"""Fixtures that several files of system tests share."""
import os, tempfile
import pytest
from processes import MODEL, Router, Stack

if not os.path.exists(MODEL):
    collect_ignore_glob = ['test_*.py']
    print('the system tests are skipped: the model is not there, run deploy/get-model.sh')


@pytest.fixture
def folder():
    """A short path: unix socket names hold 107 bytes."""
    with tempfile.TemporaryDirectory(prefix='tp-') as path:
        yield path


@pytest.fixture
def start_router(folder):
    """start_router(*args): a router alone, to which wire workers connect."""
    routers = []

    def start(*args, **options):
        routers.append(Router(folder, args, **options))
        return routers[-1]
    yield start
    for router in routers:
        router.close()


@pytest.fixture(scope='session')
def stack():
    """One kvstore, two workers and a router with the real model, shared by all tests that leave it as it was."""
    with Stack(workers=2) as s:
        yield s
