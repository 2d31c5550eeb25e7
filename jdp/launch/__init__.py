"""Launch: the processes of a job on one host, from start to end."""
