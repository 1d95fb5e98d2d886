"""What can be found out on a machine with a GPU in nine minutes, in one report;
``docs/design/009-devices.md`` says how."""
