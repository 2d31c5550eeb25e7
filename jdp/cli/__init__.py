"""Command line: what can be done with jdp from a shell?"""
