"""The command line: one file per command, on the standard library's argparse. None needs torch to start."""
