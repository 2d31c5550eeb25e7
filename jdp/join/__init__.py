"""Join: how do processes with different amounts of data train together?"""
