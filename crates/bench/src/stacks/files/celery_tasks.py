from celery import Celery

app = Celery("tasks", broker="redis://127.0.0.1:@redis@/0", backend="redis://127.0.0.1:@redis@/1")
app.conf.broker_connection_retry_on_startup = True


@app.task(name="add")
def add(one, two):
    return one + two
