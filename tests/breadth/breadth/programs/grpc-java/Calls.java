import io.grpc.*;
import io.grpc.stub.*;
import io.netty.channel.epoll.Epoll;
import java.io.*;
import java.lang.ProcessBuilder.Redirect;
import java.nio.charset.StandardCharsets;
import java.util.*;
import java.util.concurrent.*;

/**
 * Calls of every kind between two processes. With the argument "serve" this is the server, otherwise
 * the client, which starts the server.
 */
public class Calls {
    static final int PORT = 5052;
    static final MethodDescriptor.Marshaller<byte[]> BYTES = new MethodDescriptor.Marshaller<>() {
        public InputStream stream(byte[] value) {
            return new ByteArrayInputStream(value);
        }

        public byte[] parse(InputStream stream) {
            try {
                return stream.readAllBytes();
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    };

    static MethodDescriptor<byte[], byte[]> method(String name, MethodDescriptor.MethodType type) {
        return MethodDescriptor.<byte[], byte[]>newBuilder(BYTES, BYTES).setFullMethodName("s/" + name).setType(type).build();
    }

    static final MethodDescriptor<byte[], byte[]> ECHO = method("Echo", MethodDescriptor.MethodType.UNARY);
    static final MethodDescriptor<byte[], byte[]> SLEEP = method("Sleep", MethodDescriptor.MethodType.UNARY);
    static final MethodDescriptor<byte[], byte[]> FAIL = method("Fail", MethodDescriptor.MethodType.UNARY);
    static final MethodDescriptor<byte[], byte[]> STOP = method("Stop", MethodDescriptor.MethodType.UNARY);
    static final MethodDescriptor<byte[], byte[]> COUNT = method("Count", MethodDescriptor.MethodType.SERVER_STREAMING);
    static final MethodDescriptor<byte[], byte[]> SUM = method("Sum", MethodDescriptor.MethodType.CLIENT_STREAMING);
    static final MethodDescriptor<byte[], byte[]> TALK = method("Talk", MethodDescriptor.MethodType.BIDI_STREAMING);
    static final Metadata.Key<String> WHY = Metadata.Key.of("why", Metadata.ASCII_STRING_MARSHALLER);

    static byte[] reversed(byte[] bytes) {
        byte[] turned = new byte[bytes.length];
        for (int at = 0; at < bytes.length; at++)
            turned[at] = bytes[bytes.length - 1 - at];
        return turned;
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static int number(byte[] bytes) {
        return Integer.parseInt(new String(bytes, StandardCharsets.UTF_8));
    }

    static Server server;

    static void serve() throws Exception {
        ServerServiceDefinition service = ServerServiceDefinition.builder("s")
            .addMethod(ECHO, ServerCalls.asyncUnaryCall((request, answer) -> {
                answer.onNext(reversed(request));
                answer.onCompleted();
            }))
            .addMethod(SLEEP, ServerCalls.asyncUnaryCall((request, answer) -> {
                try {
                    Thread.sleep(number(request));
                    answer.onNext(request);
                    answer.onCompleted();
                } catch (InterruptedException | StatusRuntimeException error) {
                    // The client has gone before its answer.
                }
            }))
            .addMethod(FAIL, ServerCalls.asyncUnaryCall((request, answer) -> {
                Metadata trailers = new Metadata();
                trailers.put(WHY, new String(request, StandardCharsets.UTF_8));
                answer.onError(Status.FAILED_PRECONDITION.withDescription("not so").asRuntimeException(trailers));
            }))
            .addMethod(STOP, ServerCalls.asyncUnaryCall((request, answer) -> {
                server.shutdown();
                answer.onNext(request);
                answer.onCompleted();
            }))
            .addMethod(COUNT, ServerCalls.asyncServerStreamingCall((request, plain) -> {
                ServerCallStreamObserver<byte[]> answer = (ServerCallStreamObserver<byte[]>) plain;
                int[] next = {0};
                int end = number(request);
                answer.setOnReadyHandler(() -> {
                    while (answer.isReady() && next[0] < end)
                        answer.onNext(bytes("x".repeat(next[0] % 3000) + next[0]++));
                    if (next[0] == end) {
                        next[0]++;
                        answer.onCompleted();
                    }
                });
            }))
            .addMethod(SUM, ServerCalls.asyncClientStreamingCall(answer -> new StreamObserver<byte[]>() {
                long sum;

                public void onNext(byte[] part) {
                    sum += part.length;
                }

                public void onError(Throwable error) {}

                public void onCompleted() {
                    answer.onNext(bytes("" + sum));
                    answer.onCompleted();
                }
            }))
            .addMethod(TALK, ServerCalls.asyncBidiStreamingCall(answer -> new StreamObserver<byte[]>() {
                public void onNext(byte[] part) {
                    answer.onNext(reversed(part));
                }

                public void onError(Throwable error) {}

                public void onCompleted() {
                    answer.onCompleted();
                }
            }))
            .build();
        server = Grpc.newServerBuilderForPort(PORT, InsecureServerCredentials.create())
            .executor(Executors.newCachedThreadPool()).permitKeepAliveTime(1, TimeUnit.SECONDS).permitKeepAliveWithoutCalls(true)
            .maxInboundMessageSize(1 << 24).addService(service).build().start();
        System.out.println("up");
        server.awaitTermination();
        System.out.println("ended");
        System.exit(0);
    }

    static Process start() throws Exception {
        List<String> words = new ArrayList<>(List.of(ProcessHandle.current().info().command().orElseThrow()));
        words.addAll(java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments().stream()
            .filter(word -> word.startsWith("-D") || word.startsWith("-X")).toList());
        words.addAll(List.of("-cp", System.getProperty("java.class.path"), "Calls", "serve"));
        Process process = new ProcessBuilder(words).redirectError(Redirect.INHERIT).start();
        check("up".equals(new BufferedReader(new InputStreamReader(process.getInputStream())).readLine()), "the server starts");
        return process;
    }

    static ManagedChannel channel() {
        return Grpc.newChannelBuilder("127.0.0.1:" + PORT, InsecureChannelCredentials.create())
            .keepAliveTime(10, TimeUnit.SECONDS).keepAliveTimeout(2, TimeUnit.SECONDS)
            .keepAliveWithoutCalls(true).maxInboundMessageSize(1 << 24).build();
    }

    static void check(boolean holds, String what) {
        if (!holds)
            throw new IllegalStateException("does not hold: " + what);
    }

    static CallOptions within(int seconds) {
        return CallOptions.DEFAULT.withDeadlineAfter(seconds, TimeUnit.SECONDS);
    }

    static byte[] ask(Channel channel, MethodDescriptor<byte[], byte[]> method, String text) {
        return ClientCalls.blockingUnaryCall(channel, method, within(60), bytes(text));
    }

    static StatusRuntimeException refused(Callable<?> call) throws Exception {
        try {
            call.call();
        } catch (StatusRuntimeException error) {
            return error;
        }
        throw new IllegalStateException("a call succeeded that should not have");
    }

    static class Gatherer implements StreamObserver<byte[]> {
        final BlockingQueue<byte[]> came = new LinkedBlockingQueue<>();
        final CompletableFuture<Void> ended = new CompletableFuture<>();

        public void onNext(byte[] part) {
            came.add(part);
        }

        public void onError(Throwable error) {
            ended.completeExceptionally(error);
        }

        public void onCompleted() {
            ended.complete(null);
        }
    }

    static void unary(Channel channel, String name) {
        for (int number = 0; number < 500; number++) {
            byte[] message = bytes((name + number).repeat(1 + number % 300));
            byte[] answer = ClientCalls.blockingUnaryCall(channel, ECHO, within(60), message);
            check(Arrays.equals(answer, reversed(message)), "the answer to " + name + number);
        }
    }

    static void streams(Channel channel) throws Exception {
        int count = 0;
        Iterator<byte[]> parts = ClientCalls.blockingServerStreamingCall(channel, COUNT, within(60), bytes("5000"));
        for (; parts.hasNext(); count++)
            check(new String(parts.next()).equals("x".repeat(count % 3000) + count), "part " + count);
        check(count == 5000, "all parts came: " + count);
        Gatherer sum = new Gatherer();
        StreamObserver<byte[]> sender = ClientCalls.asyncClientStreamingCall(channel.newCall(SUM, within(60)), sum);
        for (int part = 0; part < 2000; part++)
            sender.onNext(new byte[part]);
        sender.onCompleted();
        sum.ended.get(60, TimeUnit.SECONDS);
        check(number(sum.came.take()) == 1999 * 1000, "the sum");
        Gatherer talk = new Gatherer();
        StreamObserver<byte[]> speaker = ClientCalls.asyncBidiStreamingCall(channel.newCall(TALK, within(60)), talk);
        for (int turn = 0; turn < 1000; turn++) {
            speaker.onNext(bytes("turn" + turn));
            byte[] answer = talk.came.poll(60, TimeUnit.SECONDS);
            check(answer != null && Arrays.equals(answer, reversed(bytes("turn" + turn))), "turn " + turn);
        }
        speaker.onCompleted();
        talk.ended.get(60, TimeUnit.SECONDS);
    }

    static void together(Channel channel, int calls) throws Exception {
        List<Future<byte[]>> answers = new ArrayList<>();
        for (int number = 0; number < calls; number++)
            answers.add(ClientCalls.futureUnaryCall(channel.newCall(ECHO, within(60)), bytes(("n" + number).repeat(5000))));
        for (int number = 0; number < calls; number++)
            check(new String(answers.get(number).get(60, TimeUnit.SECONDS)).equals(
                new String(reversed(bytes(("n" + number).repeat(5000))))), "call " + number);
    }

    static void failures(Channel channel) throws Exception {
        StatusRuntimeException late = refused(() -> ClientCalls.blockingUnaryCall(
            channel, SLEEP, CallOptions.DEFAULT.withDeadlineAfter(200, TimeUnit.MILLISECONDS), bytes("1500")));
        check(late.getStatus().getCode() == Status.Code.DEADLINE_EXCEEDED, "a call past its deadline: " + late.getStatus());
        StatusRuntimeException failed = refused(() -> ask(channel, FAIL, "because"));
        check(failed.getStatus().getCode() == Status.Code.FAILED_PRECONDITION, "a call that fails: " + failed.getStatus());
        check("because".equals(failed.getTrailers().get(WHY)), "its trailers");
        Gatherer cut = new Gatherer();
        ClientCall<byte[], byte[]> call = channel.newCall(COUNT, within(60));
        ClientCalls.asyncServerStreamingCall(call, bytes("1000000"), cut);
        check(cut.came.poll(60, TimeUnit.SECONDS) != null, "a long stream begins");
        call.cancel("enough", null);
        try {
            cut.ended.get(60, TimeUnit.SECONDS);
            check(false, "a cancelled stream ended well");
        } catch (ExecutionException error) {
            check(Status.fromThrowable(error.getCause()).getCode() == Status.Code.CANCELLED, "a cancelled call: " + error.getCause());
        }
        byte[] large = new byte[3_000_000];
        new Random(1).nextBytes(large);
        check(Arrays.equals(ClientCalls.blockingUnaryCall(channel, ECHO, within(60), large), reversed(large)), "a large message");
    }

    static void signal(Process process, String name) throws Exception {
        check(new ProcessBuilder("kill", "-" + name, "" + process.pid()).start().waitFor() == 0, "the signal " + name);
    }

    static ManagedChannel[] channels = new ManagedChannel[4];

    static void calls() throws Exception {
        List<Future<?>> workers = new ArrayList<>();
        ExecutorService pool = Executors.newCachedThreadPool();
        for (int number = 0; number < channels.length; number++) {
            ManagedChannel channel = channels[number] = channel();
            String name = "w" + number + "-";
            workers.add(pool.submit(() -> {
                unary(channel, name);
                streams(channel);
                return null;
            }));
        }
        for (Future<?> worker : workers)
            worker.get(120, TimeUnit.SECONDS);
        System.out.println("unary calls and streams on four channels");
        for (int round = 0; round < 5; round++)
            together(channels[0], 50);
        System.out.println("50 calls at a time");
        failures(channels[0]);
        System.out.println("deadline, failure, cancellation, a large message");
    }

    /**
     * Idles for longer than the interval of pings. Then the server is stopped, and the next ping
     * fails.
     */
    static void keepalive(Process process) throws Exception {
        Thread.sleep(12_000);
        check(channels[0].getState(false) == ConnectivityState.READY, "kept alive");
        ask(channels[0], ECHO, "still");
        signal(process, "STOP");
        StatusRuntimeException silent = refused(() -> ask(channels[0], ECHO, "anyone"));
        signal(process, "CONT");
        System.out.println("a server that stopped: " + silent.getStatus().getCode() + " " + silent.getStatus().getDescription());
        check(silent.getStatus().getCode() == Status.Code.UNAVAILABLE, "a server that stopped");
        ask(channels[0], ECHO, "again");
    }

    static void endings(Process process) throws Exception {
        Future<byte[]> under = ClientCalls.futureUnaryCall(channels[1].newCall(SLEEP, within(60)), bytes("1500"));
        Thread.sleep(300);
        ask(channels[2], STOP, "");
        StatusRuntimeException closed = refused(() -> {
            Thread.sleep(300);
            return ask(channels[3], ECHO, "too late");
        });
        check(closed.getStatus().getCode() == Status.Code.UNAVAILABLE, "a call after the end: " + closed.getStatus());
        check(number(under.get(60, TimeUnit.SECONDS)) == 1500, "the call that was under way");
        check(process.waitFor(60, TimeUnit.SECONDS) && process.exitValue() == 0, "the server ends");
        System.out.println("a server that ends: the call under way was answered");
        Process second = start();
        try {
            byte[] answer = ClientCalls.blockingUnaryCall(channels[1], ECHO, within(60).withWaitForReady(), bytes("abc"));
            check(new String(answer).equals("cba"), "the second server");
            Future<byte[]> lost = ClientCalls.futureUnaryCall(channels[1].newCall(SLEEP, within(60)), bytes("30000"));
            Thread.sleep(300);
            signal(second, "KILL");
            try {
                lost.get(60, TimeUnit.SECONDS);
                check(false, "a call outlived its server");
            } catch (ExecutionException error) {
                Status status = Status.fromThrowable(error.getCause());
                System.out.println("a server that was killed: " + status.getCode() + " " + status.getDescription());
                check(status.getCode() == Status.Code.UNAVAILABLE, "a server that was killed");
            }
        } finally {
            second.destroyForcibly();
        }
        Process third = start();
        try {
            ClientCalls.blockingUnaryCall(channels[1], ECHO, within(60).withWaitForReady(), bytes("abc"));
            unary(channels[1], "third-");
        } finally {
            third.destroyForcibly();
        }
        System.out.println("and started again: answers");
    }

    public static void main(String[] words) throws Exception {
        if (words.length > 0 && words[0].equals("serve")) {
            serve();
            return;
        }
        check(Epoll.isAvailable() != Boolean.getBoolean("io.netty.transport.noNative"), "the sockets asked for");
        Process process = start();
        try {
            calls();
            keepalive(process);
            endings(process);
        } finally {
            process.destroyForcibly();
        }
        System.exit(0);
    }
}
