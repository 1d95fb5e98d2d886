"""Tests, probes and benchmarks on a machine with a GPU in nine minutes, in one report
(``docs/design/009-devices.md``)."""
