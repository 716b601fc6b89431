"""Frozen players on ranks of their own: `teacher=zero3@2-3,*=ddp@0-1`.

[Note: serving]
Some ranks train, and others serve frozen players to them. Both sorts start alike: every rank makes the game. Then each
sort connects to a process group of its own, which is torch's default group there, so that everything that counts ranks
counts those that train. A serving rank never trains. It waits for calls.

    training rank                                     serving ranks
    self.teacher(x)  ->  the call, x, noise's place   ->  run it, keep its graph
                     <-  what it returns              <-
    loss.backward()  ->  gradients of what it returned  ->  run its backward
                     <-  gradients of x               <-

Training rank t is served by the t-th serving rank, counted round and round. If the serving ranks share the weights
(zero3, fsdp, pipeline), all must run every call together. So in a phase all training ranks make the same calls in the
same order, and they are answered in rounds. A serving rank without a call in a round runs one that another one answers.
Inside `gathered()` and `averaged()` weights are whole, and each training rank may call alone.

The messages are written by hand, over gloo. torch.distributed.rpc could send calls, but its gradients need a context of
its own around every backward, and it has no rounds.
"""
