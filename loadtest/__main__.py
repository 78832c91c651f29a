"""`python -m orcaserve.loadtest ...`: the same as `orcaserve loadtest ...`."""

from orcaserve.loadtest.cli import loadtest_app

if __name__ == "__main__":
    loadtest_app(prog_name="orcaserve loadtest")
