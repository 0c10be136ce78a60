// A service in Java, and its load generator. `Service PORT` serves; `Service PORT REQUESTS` sends
// that many requests on one connection.

import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.Executors;

public final class Service {
    private static final byte[] ANSWER = "hello from Java\n".getBytes(StandardCharsets.UTF_8);

    public static void main(String[] words) throws Exception {
        int port = Integer.parseInt(words[0]);
        if (words.length == 1) {
            serve(port);
        } else {
            load(port, Integer.parseInt(words[1]));
        }
    }

    private static void serve(int port) throws Exception {
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", port), 0);
        server.createContext("/", exchange -> {
            exchange.sendResponseHeaders(200, ANSWER.length);
            exchange.getResponseBody().write(ANSWER);
            exchange.close();
        });
        server.setExecutor(Executors.newFixedThreadPool(4));
        server.start();
    }

    private static void load(int port, int requests) throws Exception {
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        HttpRequest request = HttpRequest.newBuilder(URI.create("http://127.0.0.1:" + port + "/")).build();
        for (int asked = 0; asked < requests; asked++) {
            byte[] answer = client.send(request, HttpResponse.BodyHandlers.ofByteArray()).body();
            if (!java.util.Arrays.equals(answer, ANSWER)) {
                throw new IllegalStateException(new String(answer, StandardCharsets.UTF_8));
            }
        }
        System.out.println(requests + " answers");
    }
}
