"""Protection from what the operating system and other people may do to a process: files and locks,
signals, memory limits, secrets, connections.
"""
