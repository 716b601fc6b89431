"""Rehearsals on a CPU of what is otherwise only seen on several GPUs.

threads.py runs every backward in a thread of its own, as autograd does for each GPU. ordered.py has process groups that
run their operations one after the other, and refuse what NCCL refuses.
"""
