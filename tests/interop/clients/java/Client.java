import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import io.grpc.CallOptions;
import io.grpc.ChannelCredentials;
import io.grpc.ClientCall;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.MethodType;
import io.grpc.Status;
import io.grpc.TlsChannelCredentials;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.util.Base64;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;

/** A client of grpc-java that does what its standard input says: see shell.py. */
public final class Client {
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
  private static final ScheduledExecutorService LATER = Executors.newScheduledThreadPool(1);

  /** Messages are bytes. */
  private static final MethodDescriptor.Marshaller<byte[]> RAW =
      new MethodDescriptor.Marshaller<>() {
        @Override
        public InputStream stream(byte[] message) {
          return new ByteArrayInputStream(message);
        }

        @Override
        public byte[] parse(InputStream stream) {
          try {
            return stream.readAllBytes();
          } catch (IOException error) {
            throw new UncheckedIOException(error);
          }
        }
      };

  private static ManagedChannel channel(JsonObject given) throws IOException {
    ChannelCredentials credentials = InsecureChannelCredentials.create();
    if (!given.get("ca").getAsString().isEmpty()) {
      TlsChannelCredentials.Builder tls = TlsChannelCredentials.newBuilder();
      tls.trustManager(new File(given.get("ca").getAsString()));
      String certificate = given.get("certificate").getAsString();
      if (!certificate.isEmpty()) {
        tls.keyManager(new File(certificate), new File(given.get("key").getAsString()));
      }
      credentials = tls.build();
    }
    String target = given.get("target").getAsString();
    ManagedChannelBuilder<?> builder =
        target.startsWith("unix:")
            ? Grpc.newChannelBuilder(target, credentials)
            : NettyChannelBuilder.forTarget(target, credentials);
    int keepalive = given.get("keepalive_s").getAsInt();
    if (keepalive > 0) {
      builder.keepAliveTime(keepalive, TimeUnit.SECONDS).keepAliveWithoutCalls(true);
    }
    return builder.build();
  }

  private static Metadata metadata(JsonArray pairs) {
    Metadata metadata = new Metadata();
    for (JsonElement pair : pairs) {
      String name = pair.getAsJsonArray().get(0).getAsString();
      String value = pair.getAsJsonArray().get(1).getAsString();
      if (name.endsWith("-bin")) {
        metadata.put(
            Metadata.Key.of(name, Metadata.BINARY_BYTE_MARSHALLER),
            Base64.getDecoder().decode(value));
      } else {
        metadata.put(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER), value);
      }
    }
    return metadata;
  }

  /** A call that runs. */
  private static final class Run extends ClientCall.Listener<byte[]> {
    private final JsonObject wanted;
    private final byte[] message;
    private final boolean streams;
    private final ClientCall<byte[], byte[]> call;
    private int left;
    private int answers;
    private byte[] answer = new byte[0];

    Run(ManagedChannel channel, JsonObject wanted) {
      this.wanted = wanted;
      message = Base64.getDecoder().decode(wanted.get("message").getAsString());
      streams = wanted.get("op").getAsString().equals("stream");
      left = streams ? wanted.get("count").getAsInt() : 1;
      MethodDescriptor<byte[], byte[]> method =
          MethodDescriptor.<byte[], byte[]>newBuilder(RAW, RAW)
              .setType(streams ? MethodType.BIDI_STREAMING : MethodType.UNARY)
              .setFullMethodName(wanted.get("method").getAsString().substring(1))
              .build();
      long timeout = (long) (1000 * wanted.get("timeout_s").getAsDouble());
      CallOptions options =
          CallOptions.DEFAULT.withDeadlineAfter(timeout, TimeUnit.MILLISECONDS);
      if (wanted.get("gzip").getAsBoolean()) {
        options = options.withCompression("gzip");
      }
      call = channel.newCall(method, options);
    }

    void begin() {
      call.start(this, metadata(wanted.getAsJsonArray("metadata")));
      call.request(Integer.MAX_VALUE);
      send();
      double cancelled = wanted.get("cancel_s").getAsDouble();
      if (cancelled > 0) {
        long milliseconds = (long) (1000 * cancelled);
        LATER.schedule(() -> call.cancel("as asked", null), milliseconds, TimeUnit.MILLISECONDS);
      }
    }

    private synchronized void send() {
      while (left > 0 && (!streams || call.isReady())) {
        call.sendMessage(message);
        if (--left == 0) {
          call.halfClose();
        }
      }
    }

    @Override
    public void onReady() {
      send();
    }

    @Override
    public void onMessage(byte[] content) {
      answer = content;
      if (++answers == wanted.get("cancel_after").getAsInt()) {
        call.cancel("as asked", null);
      }
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      byte[] details = trailers.get(DETAILS);
      JsonObject done = new JsonObject();
      done.add("id", wanted.get("id"));
      done.addProperty("code", status.getCode().value());
      done.addProperty("words", status.getDescription() == null ? "" : status.getDescription());
      done.addProperty("answers", answers);
      done.addProperty("answer", Base64.getEncoder().encodeToString(answer));
      done.addProperty(
          "details", details == null ? "" : Base64.getEncoder().encodeToString(details));
      synchronized (System.out) {
        System.out.println(done);
        System.out.flush();
      }
    }
  }

  public static void main(String[] arguments) throws IOException {
    ManagedChannel channel = channel(JsonParser.parseString(arguments[0]).getAsJsonObject());
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
    for (String line = in.readLine(); line != null; line = in.readLine()) {
      new Run(channel, JsonParser.parseString(line).getAsJsonObject()).begin();
    }
    System.exit(0);
  }
}
