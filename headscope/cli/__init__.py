"""The command line's parts: shared flags, how a study is executed, the commands of one kind each."""
