"""Watch: where is each process of a job, and which one do the others wait for?"""
