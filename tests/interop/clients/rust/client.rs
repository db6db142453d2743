//! A client of tonic that does what its standard input says: see shell.py.

use std::fs::read;
use std::time::Duration;

use base64::{engine::general_purpose::STANDARD, Engine};
use bytes::{Buf, BufMut};
use serde_json::{json, Value};
use tokio::io::{stdin, AsyncBufReadExt, BufReader};
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::client::Grpc;
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::{AsciiMetadataKey, BinaryMetadataKey, BinaryMetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Error, Identity};
use tonic::{Request, Status};

/// Messages are bytes.
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining()).to_vec()))
    }
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap()
}

fn channel(given: &Value) -> Result<Channel, Error> {
    let (target, ca) = (text(given, "target"), text(given, "ca"));
    let mut endpoint = Endpoint::from_shared(match (target.starts_with("unix:"), ca.is_empty()) {
        (true, _) => target.to_string(),
        (false, true) => format!("http://{target}"),
        (false, false) => format!("https://{target}"),
    })?;
    if !ca.is_empty() {
        let file = |key| read(text(given, key)).unwrap();
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(file("ca")));
        if !text(given, "certificate").is_empty() {
            tls = tls.identity(Identity::from_pem(file("certificate"), file("key")));
        }
        endpoint = endpoint.tls_config(tls)?;
    }
    let keepalive_s = given["keepalive_s"].as_u64().unwrap();
    if keepalive_s > 0 {
        let every = Duration::from_secs(keepalive_s);
        endpoint = endpoint.http2_keep_alive_interval(every).keep_alive_while_idle(true);
    }
    Ok(endpoint.connect_lazy())
}

fn request<T>(wanted: &Value, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(Duration::from_secs_f64(wanted["timeout_s"].as_f64().unwrap()));
    for pair in wanted["metadata"].as_array().unwrap() {
        let (name, value) = (pair[0].as_str().unwrap(), pair[1].as_str().unwrap());
        if name.ends_with("-bin") {
            let name: BinaryMetadataKey = name.parse().unwrap();
            let value = BinaryMetadataValue::from_bytes(&STANDARD.decode(value).unwrap());
            request.metadata_mut().append_bin(name, value);
        } else {
            let name: AsciiMetadataKey = name.parse().unwrap();
            request.metadata_mut().append(name, value.parse().unwrap());
        }
    }
    request
}

/// What came back.
#[derive(Default)]
struct Came {
    answers: u64,
    last: Vec<u8>,
}

async fn call(mut client: Grpc<Channel>, wanted: &Value, came: &mut Came) -> Result<(), Status> {
    let unavailable = |error: Error| Status::unavailable(format!("{error:?}"));
    client.ready().await.map_err(unavailable)?;
    let path: PathAndQuery = text(wanted, "method").parse().unwrap();
    let message = STANDARD.decode(text(wanted, "message")).unwrap();
    if text(wanted, "op") == "call" {
        came.last = client.unary(request(wanted, message), path, Raw).await?.into_inner();
        came.answers = 1;
        return Ok(());
    }
    let count = wanted["count"].as_u64().unwrap() as usize;
    let messages = tokio_stream::iter(std::iter::repeat(message).take(count));
    let answer = client.streaming(request(wanted, messages), path, Raw).await?;
    let mut stream = answer.into_inner();
    while let Some(message) = stream.next().await {
        came.last = message?;
        came.answers += 1;
        if came.answers == wanted["cancel_after"].as_u64().unwrap() {
            return Err(Status::cancelled("as asked")); // the stream is dropped
        }
    }
    Ok(())
}

async fn run(channel: Channel, wanted: Value) {
    let mut client = Grpc::new(channel);
    if wanted["gzip"].as_bool().unwrap() {
        client = client.send_compressed(CompressionEncoding::Gzip);
    }
    let mut came = Came::default();
    let cancel_s = wanted["cancel_s"].as_f64().unwrap();
    let done = if cancel_s > 0.0 {
        let cancelled = Duration::from_secs_f64(cancel_s);
        timeout(cancelled, call(client, &wanted, &mut came))
            .await
            .unwrap_or_else(|_| Err(Status::cancelled("as asked"))) // the call is dropped
    } else {
        call(client, &wanted, &mut came).await
    };
    let status = done.err().unwrap_or_else(|| Status::ok(""));
    let line = json!({
        "id": wanted["id"],
        "code": i32::from(status.code()),
        "words": status.message(),
        "answers": came.answers,
        "answer": STANDARD.encode(&came.last),
        "details": STANDARD.encode(status.details()),
    });
    println!("{line}");
}

#[tokio::main]
async fn main() {
    let given = std::env::args().nth(1).unwrap();
    let channel = channel(&serde_json::from_str(&given).unwrap()).unwrap();
    let mut lines = BufReader::new(stdin()).lines();
    while let Some(line) = lines.next_line().await.unwrap() {
        tokio::spawn(run(channel.clone(), serde_json::from_str(&line).unwrap()));
    }
}
