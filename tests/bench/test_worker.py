"""The worker process: it ends without a word when its driver was killed."""

from multiprocessing import Pipe

from gemmpipe.bench import worker


def test_a_reply_that_nothing_receives_ends_the_worker() -> None:
    driver, own = Pipe()
    reply = worker.WorkerReply(trials=[], spent_s={})
    assert worker._send(own, reply)
    assert driver.recv() == reply
    driver.close()
    assert not worker._send(own, reply)
    assert worker._next(own) is None


def test_a_driver_killed_with_replies_unread_ends_the_worker() -> None:
    driver, own = Pipe()
    assert worker._send(own, worker.WorkerReply(trials=[], spent_s={}))
    driver.close()  # with a reply in its buffer: the next receive is reset, not at its end
    assert worker._next(own) is None
