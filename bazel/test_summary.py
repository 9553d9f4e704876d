"""Prints the sum of what the last `bazel test` ran: N passed, N failed, N skipped.

Usage: test_summary.py TESTLOGS LABEL...: Bazel's folder of test logs, and the test targets.
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def main() -> None:
    testlogs = pathlib.Path(sys.argv[1])
    total = failed = skipped = 0
    for label in sys.argv[2:]:
        report = testlogs / label.removeprefix("//").replace(":", "/") / "test.xml"
        if not report.exists():  # did not get to run
            total, failed = total + 1, failed + 1
            continue
        for suite in ElementTree.parse(report).iter("testsuite"):
            total += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
    print(f"{total - failed - skipped} passed, {failed} failed, {skipped} skipped")


main()
