"""What became of loops: `explain` of a program, `report` of a process, and what the compiler made of a loop."""
