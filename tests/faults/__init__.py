"""The fuzz: `make faults` damages what the commands read, in thousands of ways, and holds the same few rules each time.

__main__.py   the command: cases in parallel, the failures, the table
kinds/        a file for each kind of case; a new kind is a function there and a line in KINDS
case.py       a case: its folder, its dice, and the commands that it runs
child.py      a command in a forked process
rules.py      what must hold after every command
known.py      tiny runs that are trained once, and what the commands make of them
"""
